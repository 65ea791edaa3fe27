//! Maps of who ran where: a row for each CPU, time to the right.
//!
//! A column of pixels shows what took most of its time. A lock shows as a stripe through its holder's colour, where it was held
//! for most of a column's time; while the holder is not running, the stripe goes on, in red, where the holder ran last.

use super::Drawing;
use super::canvas::{Canvas, Drawn, FRAME, GRID, Legend, Look, Marker, PNG_SCALE, Sample};
use crate::schedule::{MarkKind, Schedule};
use plotters::prelude::DrawingBackend;
use plotters::style::text_anchor::HPos;
use plotters::style::{BLACK, RGBColor, WHITE};

const WIDTH: i32 = 1280;
const LEFT: i32 = 80;
const RIGHT: i32 = 24;
const TOP: i32 = 76;

const PARKED: RGBColor = RGBColor(0x00, 0x00, 0x00);
const KICKED: RGBColor = RGBColor(0x00, 0x8a, 0x2e);
const PREEMPTED: RGBColor = RGBColor(0xe0, 0x00, 0x20);

/// A map.
#[derive(Clone, Debug)]
pub struct Map {
    /// Above it.
    pub title: String,
    /// Where it comes from.
    pub subtitle: String,
    /// What it shows.
    pub schedule: Schedule,
    /// How many CPUs there are.
    pub cpus: usize,
    /// From this ns on.
    pub from: u64,
    /// To this one.
    pub to: u64,
}

/// One colour for each VM up to the twelfth, grey beyond; the brightness tells vCPUs apart.
pub fn color(vm: usize, vcpu: usize, vcpus: usize) -> RGBColor {
    const VMS: [(u8, u8, u8); 12] = [
        (0x1f, 0x77, 0xd0),
        (0xf0, 0x8c, 0x00),
        (0x2c, 0xa0, 0x4c),
        (0xa0, 0x50, 0xd8),
        (0xc8, 0xb4, 0x00),
        (0xe0, 0x50, 0xa8),
        (0x00, 0xb4, 0xb4),
        (0x9c, 0x60, 0x30),
        (0x80, 0xc4, 0x20),
        (0x50, 0x50, 0xb0),
        (0xf0, 0x80, 0x70),
        (0x50, 0x90, 0x80),
    ];
    let (r, g, b) = VMS.get(vm).copied().unwrap_or((0x80, 0x80, 0x80));
    // From half as bright to half as far from white.
    let place = if vcpus > 1 { vcpu as f64 / (vcpus - 1) as f64 } else { 0.4 };
    let shade = |value: u8| {
        let value = f64::from(value);
        let shaded = if place < 0.4 { value * (0.5 + 1.25 * place) } else { value + (255.0 - value) * (place - 0.4) };
        shaded.round() as u8
    };
    RGBColor(shade(r), shade(g), shade(b))
}

/// Time in each column of one row, by what took it: `(column, what, ns)` for consecutive pieces.
struct Columns {
    from: u64,
    to: u64,
    columns: usize,
}

impl Columns {
    /// Calls for each column that `start..end` touches, with the ns of it in the column.
    fn spread(&self, start: u64, end: u64, mut each: impl FnMut(usize, u64)) {
        let (start, end) = (start.clamp(self.from, self.to), end.clamp(self.from, self.to));
        if start >= end {
            return;
        }
        for column in self.of(start)..=self.of(end - 1) {
            let (left, right) = (self.begin(column), self.begin(column + 1));
            each(column, end.min(right).saturating_sub(start.max(left)));
        }
    }

    fn of(&self, at: u64) -> usize {
        let column = (u128::from(at - self.from) * self.columns as u128 / u128::from(self.to - self.from)) as usize;
        // Rounded down, `begin` may lie a column further.
        if column + 1 < self.columns && at >= self.begin(column + 1) { column + 1 } else { column }
    }

    fn begin(&self, column: usize) -> u64 {
        self.from + (u128::from(self.to - self.from) * column as u128 / self.columns as u128) as u64
    }
}

/// What takes most of each column, if anything takes more than nothing does.
#[derive(Clone)]
struct Row<T> {
    /// The present best of each column, its time, and all time taken.
    best: Vec<(Option<T>, u64, u64)>,
}

impl<T: Copy + PartialEq> Row<T> {
    fn new(columns: usize) -> Self {
        Self { best: vec![(None, 0, 0); columns] }
    }

    fn add(&mut self, columns: &Columns, (start, end): (u64, u64), what: T) {
        columns.spread(start, end, |column, ns| {
            let (best, most, all) = &mut self.best[column];
            *all += ns;
            if *best == Some(what) {
                *most += ns;
            } else if ns > *most {
                (*best, *most) = (Some(what), ns);
            }
        });
    }

    /// Neighbouring columns that show the same.
    fn runs(&self, columns: &Columns) -> Vec<(usize, usize, T)> {
        let mut runs: Vec<(usize, usize, T)> = Vec::new();
        for (column, &(best, _, all)) in self.best.iter().enumerate() {
            let nothing = (columns.begin(column + 1) - columns.begin(column)).saturating_sub(all);
            let Some(what) = best.filter(|_| all > 0 && all >= nothing) else { continue };
            match runs.last_mut() {
                Some((_, end, before)) if *end == column && *before == what => *end = column + 1,
                _ => runs.push((column, column + 1, what)),
            }
        }
        runs
    }
}

/// Sizes of a row, in units.
#[derive(Clone, Copy)]
struct Rows {
    pitch: i32,
    /// Above the band: for marks.
    lane: i32,
    band: i32,
}

impl Rows {
    fn of(cpus: usize) -> Self {
        let pitch = (640 / cpus.max(1) as i32).clamp(6, 36);
        let lane = pitch / 3;
        Self { pitch, lane, band: pitch - lane - if pitch > 12 { 2 } else { 1 } }
    }
}

impl Map {
    fn legend(&self) -> Legend {
        let mut entries: Vec<(Sample, String)> = Vec::new();
        let vms = self.schedule.vms();
        for (&vm, &vcpus) in vms.iter().take(12) {
            let shown = vcpus.min(8);
            let colors = (0..shown).map(|n| color(vm, n * (vcpus - 1) / (shown - 1).max(1), vcpus)).collect();
            entries.push((
                Sample::Colors(colors),
                if vcpus > 1 { format!("VM {vm}, vCPUs 0 to {}", vcpus - 1) } else { format!("VM {vm}") },
            ));
        }
        if vms.len() > 12 {
            entries.push((Sample::Colors(vec![color(12, 0, 1)]), format!("{} more VMs", vms.len() - 12)));
        }
        if self.schedule.spans.iter().any(|span| span.vm.is_none()) {
            entries.push((Sample::Colors(vec![BLACK]), "other work".into()));
        }
        entries.push((Sample::Colors(vec![WHITE]), "idle".into()));
        let has = |kind| self.schedule.marks.iter().any(|mark| mark.kind == kind);
        // Holds too short to be seen need no explanation.
        let columns = self.columns(PNG_SCALE as i32);
        let stripes: Vec<_> =
            self.stripes(&columns).iter().flat_map(|row| row.runs(&columns)).map(|(_, _, running)| running).collect();
        for (running, color, name) in [(true, WHITE, "holds a lock"), (false, PREEMPTED, "its preempted holder ran here")] {
            if stripes.contains(&running) {
                entries.push((Sample::Stripe(color, self::color(0, 2, 5)), name.into()));
            }
        }
        let look = |color, marker| Look { color, marker, width: 1 };
        if has(MarkKind::Park) {
            entries.push((Sample::Marker(look(PARKED, Marker::Down)), "parked".into()));
        }
        if has(MarkKind::Kick) {
            entries.push((Sample::Marker(look(KICKED, Marker::Up)), "kicked another".into()));
        }
        Legend::new(entries, WIDTH)
    }

    fn bottom(&self) -> i32 {
        TOP + self.cpus.max(1) as i32 * Rows::of(self.cpus).pitch + 2
    }

    fn columns(&self, scale: i32) -> Columns {
        Columns { from: self.from, to: self.to.max(self.from + 1), columns: ((WIDTH - LEFT - RIGHT) * scale) as usize }
    }

    /// Each CPU's stripes: where locks are held (`true`: by who runs there).
    fn stripes(&self, columns: &Columns) -> Vec<Row<bool>> {
        let mut stripes = vec![Row::new(columns.columns); self.cpus];
        let spans = self.schedule.by_vcpu();
        for hold in self.schedule.marks.iter().filter(|mark| mark.kind == MarkKind::Hold) {
            let Some(end) = hold.end else { continue };
            let spans = spans.get(&(hold.vm, hold.vcpu)).map_or(&[][..], Vec::as_slice);
            let first = spans.partition_point(|span| span.end <= hold.at);
            let mut cpu = hold.cpu.or_else(|| Some(spans[..first].last().or(spans.get(first))?.cpu));
            let mut at = hold.at;
            let mut add = |cpu: Option<usize>, from: u64, to: u64, running| {
                if let Some(row) = cpu.and_then(|cpu| stripes.get_mut(cpu)) {
                    row.add(columns, (from, to), running);
                }
            };
            for span in spans[first..].iter().take_while(|span| span.start < end) {
                add(cpu, at, span.start, false);
                cpu = Some(span.cpu);
                add(cpu, span.start.max(at), span.end.min(end), true);
                at = span.end;
            }
            add(cpu, at, end, false);
        }
        stripes
    }

    fn axis<DB: DrawingBackend>(&self, canvas: &Canvas<DB>) -> Drawn<DB> {
        let (bottom, rows) = (self.bottom(), Rows::of(self.cpus));
        let length = (self.to - self.from).max(1);
        // At most twelve labels at round times.
        let step = (0..20).flat_map(|power| [1, 2, 5].map(|digit| digit * 10u64.pow(power))).find(|step| length / step <= 12);
        let step = step.unwrap_or(length);
        let (unit, per) = if length >= 2_000_000 { ("ms", 1e6) } else { ("µs", 1e3) };
        for at in (self.from.div_ceil(step)..=self.to / step).map(|n| n * step) {
            let x = LEFT + ((at - self.from) as f64 / length as f64 * f64::from(WIDTH - LEFT - RIGHT)).round() as i32;
            canvas.line(&[(x, TOP), (x, bottom + 4)], GRID, 1)?;
            canvas.text(&format!("{}", at as f64 / per), 15, BLACK, (x, bottom + 16), HPos::Center)?;
        }
        canvas.text(&format!("time, {unit}"), 16, BLACK, ((LEFT + WIDTH - RIGHT) / 2, bottom + 40), HPos::Center)?;
        let every = (15 / rows.pitch + 1) as usize;
        let every = if every > 1 { every.next_multiple_of(5) } else { 1 };
        for cpu in (0..self.cpus).step_by(every) {
            let y = TOP + cpu as i32 * rows.pitch + rows.lane + rows.band / 2;
            canvas.text(&cpu.to_string(), 15, BLACK, (LEFT - 8, y), HPos::Right)?;
        }
        canvas.upwards("CPU", 16, (LEFT - 56, (TOP + bottom) / 2))
    }
}

impl Drawing for Map {
    fn size(&self) -> (u32, u32) {
        (WIDTH as u32, (self.bottom() + 60 + self.legend().height() + 8) as u32)
    }

    fn draw_on<DB: DrawingBackend>(&self, canvas: &Canvas<DB>) -> Drawn<DB> {
        canvas.text(&self.title, 22, BLACK, (WIDTH / 2, 24), HPos::Center)?;
        canvas.text(&self.subtitle, 15, FRAME, (WIDTH / 2, 50), HPos::Center)?;
        self.axis(canvas)?;
        let scale = canvas.scale();
        let (rows, vms) = (Rows::of(self.cpus), self.schedule.vms());
        let columns = self.columns(scale);
        let mut bands = vec![Row::new(columns.columns); self.cpus];
        for span in &self.schedule.spans {
            if let Some(band) = bands.get_mut(span.cpu) {
                band.add(&columns, (span.start, span.end), (span.vm, span.vcpu));
            }
        }
        let x = |column: usize| LEFT * scale + column as i32;
        let y = |cpu: usize, units: i32| (TOP + cpu as i32 * rows.pitch + units) * scale;
        for (cpu, (band, stripe)) in bands.iter().zip(self.stripes(&columns)).enumerate() {
            let (top, bottom) = (y(cpu, rows.lane), y(cpu, rows.lane + rows.band));
            for (from, to, (vm, vcpu)) in band.runs(&columns) {
                let color = vm.map_or(BLACK, |vm| color(vm, vcpu, vms.get(&vm).copied().unwrap_or(1)));
                canvas.fill((x(from), top), (x(to), bottom), color)?;
            }
            let (half, middle) = ((rows.band * scale / 6).max(1), (top + bottom) / 2);
            for (from, to, running) in stripe.runs(&columns) {
                let color = if running { WHITE } else { PREEMPTED };
                // Its edges show on bright colours too.
                canvas.fill((x(from), middle - half - 1), (x(to), middle + half + 1), BLACK)?;
                canvas.fill((x(from), middle - half), (x(to), middle + half), color)?;
            }
        }
        // As wide as high, so that many of them stay apart.
        let half = (rows.lane * scale / 2).clamp(1, 3 * scale);
        for mark in &self.schedule.marks {
            let (Some(cpu), true) = (mark.cpu, (columns.from..columns.to).contains(&mark.at)) else { continue };
            if cpu >= self.cpus {
                continue;
            }
            let (x, top, bottom) = (x(columns.of(mark.at)), y(cpu, 0), y(cpu, rows.lane) - 1);
            match mark.kind {
                MarkKind::Park => canvas.polygon(vec![(x - half, top), (x + half, top), (x, bottom)], PARKED)?,
                MarkKind::Kick => canvas.polygon(vec![(x - half, bottom), (x + half, bottom), (x, top)], KICKED)?,
                MarkKind::Hold | MarkKind::Wait => {}
            }
        }
        canvas.frame((LEFT, TOP - 1), (WIDTH - RIGHT, self.bottom()))?;
        self.legend().draw(canvas, self.bottom() + 60)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Format;
    use super::*;

    fn map(lines: &str, cpus: usize, to: u64) -> Map {
        let schedule = Schedule::read(lines).unwrap();
        Map { title: "map".into(), subtitle: "test".into(), schedule, cpus, from: 0, to }
    }

    /// The pixel of a PNG in the row of a CPU, at a share of the time, so many hundredths below the top of its band.
    fn pixel(map: &Map, cpu: usize, share: f64, hundredths: i32) -> RGBColor {
        let bytes = Format::Png.bytes(map).unwrap();
        let mut image = png::Decoder::new(std::io::Cursor::new(bytes)).read_info().unwrap();
        let mut pixels = vec![0; image.output_buffer_size().unwrap()];
        let width = image.next_frame(&mut pixels).unwrap().width as usize;
        let rows = Rows::of(map.cpus);
        let x = 2.0 * (f64::from(LEFT) + share * f64::from(WIDTH - LEFT - RIGHT));
        let y = 2 * (TOP + cpu as i32 * rows.pitch + rows.lane) + 2 * rows.band * hundredths / 100;
        let at = 3 * (y as usize * width + x as usize);
        RGBColor(pixels[at], pixels[at + 1], pixels[at + 2])
    }

    const SPANS: &str = "\
        {\"span\":{\"cpu\":0,\"start\":0,\"end\":500000,\"vm\":0,\"vcpu\":0}}\n\
        {\"span\":{\"cpu\":0,\"start\":500000,\"end\":1000000,\"vm\":1,\"vcpu\":1}}\n\
        {\"span\":{\"cpu\":1,\"start\":0,\"end\":250000,\"vm\":0,\"vcpu\":3}}\n\
        {\"span\":{\"cpu\":1,\"start\":250000,\"end\":500000}}\n";

    #[test]
    fn vms_have_colours_vcpus_brightness_other_work_is_black_and_idle_time_white() {
        let map = map(SPANS, 2, 1_000_000);
        assert_eq!(pixel(&map, 0, 0.25, 10), color(0, 0, 4));
        assert_eq!(pixel(&map, 0, 0.75, 10), color(1, 1, 2));
        assert_eq!(pixel(&map, 1, 0.1, 10), color(0, 3, 4));
        assert_eq!(pixel(&map, 1, 0.4, 10), BLACK);
        assert_eq!(pixel(&map, 1, 0.875, 10), WHITE);
        let brightness = |RGBColor(r, g, b)| u32::from(r) + u32::from(g) + u32::from(b);
        assert!(brightness(color(0, 0, 4)) < brightness(color(0, 1, 4)));
        assert!(brightness(color(0, 1, 4)) < brightness(color(0, 3, 4)));
        let RGBColor(r, _, b) = color(0, 2, 4);
        assert!(b > r, "the first VM is blue");
        let all: Vec<_> = (0..13).map(|vm| color(vm, 0, 1)).collect();
        assert!((0..13).all(|vm| all[..vm].iter().all(|other| *other != all[vm])));
        assert_eq!(color(12, 1, 4), color(99, 1, 4), "all further VMs are grey");
    }

    #[test]
    fn a_held_lock_is_a_stripe_that_goes_on_in_red_where_its_holder_was_preempted() {
        let hold = "{\"mark\":{\"kind\":\"hold\",\"at\":250000,\"end\":750000,\"vm\":0,\"vcpu\":0}}\n";
        let again = "{\"span\":{\"cpu\":1,\"start\":600000,\"end\":700000,\"vm\":0,\"vcpu\":0}}\n";
        let map = map(&format!("{SPANS}{hold}{again}"), 2, 1_000_000);
        assert_eq!(pixel(&map, 0, 0.2, 50), color(0, 0, 4), "not held yet");
        assert_eq!(pixel(&map, 0, 0.4, 50), WHITE);
        assert_eq!(pixel(&map, 0, 0.4, 10), color(0, 0, 4), "the stripe is narrower than the band");
        assert_eq!(pixel(&map, 0, 0.55, 50), PREEMPTED);
        assert_eq!(pixel(&map, 0, 0.65, 50), color(1, 1, 2), "runs again, elsewhere");
        assert_eq!(pixel(&map, 1, 0.65, 50), WHITE);
        assert_eq!(pixel(&map, 1, 0.72, 50), PREEMPTED);
        assert_eq!(pixel(&map, 0, 0.8, 50), color(1, 1, 2));
    }

    #[test]
    fn a_column_shows_what_took_most_of_its_time() {
        let columns = Columns { from: 0, to: 100, columns: 10 };
        let mut row = Row::new(10);
        row.add(&columns, (0, 4), 'a');
        row.add(&columns, (4, 10), 'b');
        row.add(&columns, (10, 14), 'c');
        row.add(&columns, (20, 40), 'd');
        row.add(&columns, (95, 1000), 'e');
        assert_eq!(row.runs(&columns), [(0, 1, 'b'), (2, 4, 'd'), (9, 10, 'e')], "the second is idle for most of its time");
    }

    #[test]
    fn a_map_is_an_svg_with_axes_and_legend() {
        let marks = "{\"mark\":{\"kind\":\"park\",\"cpu\":0,\"at\":5,\"vm\":0,\"vcpu\":3}}\n\
            {\"mark\":{\"kind\":\"kick\",\"cpu\":0,\"at\":9,\"vm\":0,\"vcpu\":3}}\n";
        let svg = Format::Svg.bytes(&map(&format!("{SPANS}{marks}"), 2, 1_000_000)).unwrap();
        let svg = String::from_utf8(svg).unwrap();
        let document = roxmltree::Document::parse(&svg).unwrap();
        let text: Vec<_> = document.descendants().filter_map(|node| node.text()).map(str::trim).collect();
        for word in
            ["VM 0, vCPUs 0 to 3", "VM 1, vCPUs 0 to 1", "other work", "idle", "parked", "kicked another", "time, µs", "CPU", "500"]
        {
            assert!(text.contains(&word), "{word} in {text:?}");
        }
        let RGBColor(r, g, b) = color(1, 1, 2);
        assert!(svg.contains(&format!("#{r:02X}{g:02X}{b:02X}")));
    }
}
