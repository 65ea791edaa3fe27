//! Pictures of a sweep, each as SVG and PNG.
//!
//! Axes and legend are drawn here, from lines and text: they have to be the same in both pictures and both formats, and need
//! logarithmic scales to the base of two and of ten.

use crate::measure::{Row, WaitBucket};
use crate::report;
use crate::run::{Plan, Report};
use crate::sweep::{Sections, Sweep};
use plotters::coord::Shift;
use plotters::element::{Circle, PathElement, Polygon, Rectangle};
use plotters::prelude::{BitMapBackend, DrawingArea, DrawingAreaErrorKind, DrawingBackend, IntoDrawingArea, SVGBackend};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{BLACK, Color, FontStyle, FontTransform, IntoFont, RGBColor, TextStyle, WHITE, register_font};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// What can go wrong with a picture.
#[derive(Debug, thiserror::Error)]
pub enum PlotError {
    /// The file cannot be written.
    #[error("cannot write the picture {path}: {source}", path = path.display())]
    Write {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The drawing library refuses.
    #[error("cannot draw {path}: {why}", path = path.display())]
    Draw {
        /// The picture.
        path: PathBuf,
        /// What it says.
        why: String,
    },
}

/// Draws both pictures of a sweep and returns the files written.
///
/// # Errors
///
/// See [`PlotError`]. Files before the one that failed are there.
pub fn draw(stem: &Path, plan: &Plan, sweep: &Sweep, report: &Report) -> Result<Vec<PathBuf>, PlotError> {
    let machine = machine(plan, report);
    let pictures = [("bound", bound(sweep, report)), ("waits", waits(sweep, report))];
    let mut files = Vec::new();
    for (name, (title, panels)) in pictures {
        let picture = Picture { title, machine: &machine, legend: legend(report), panels };
        for (ending, bytes) in [("svg", picture.svg()), ("png", picture.png())] {
            let mut path = OsString::from(stem);
            path.push(format!("-{name}.{ending}"));
            let path = PathBuf::from(path);
            let bytes = bytes.map_err(|why| PlotError::Draw { path: path.clone(), why })?;
            std::fs::write(&path, bytes).map_err(|source| PlotError::Write { path: path.clone(), source })?;
            files.push(path);
        }
    }
    Ok(files)
}

/// One line about where the numbers come from.
fn machine(plan: &Plan, report: &Report) -> String {
    let repeats = report.rows.iter().map(|row| row.repeats.len()).max().unwrap_or(0);
    let seconds = plan.limits.run.as_secs_f64();
    let runs = if repeats > 1 { format!("median of {repeats} runs of {seconds} s") } else { format!("one run of {seconds} s") };
    let stopped = if report.interrupted { ", interrupted" } else { "" };
    format!("{} CPUs, {}; {runs} each{stopped}", plan.pcpus, report::place(plan))
}

/// The locks that have rows, in the order of the tables.
fn legend(report: &Report) -> Vec<&'static str> {
    let mut names = Vec::new();
    for row in &report.rows {
        if !names.contains(&row.lock) {
            names.push(row.lock);
        }
    }
    names
}

fn rows_of<'a>(report: &'a Report, sections: &Sections) -> impl Iterator<Item = &'a Row> + Clone {
    let inside = sections.inside;
    report.rows.iter().filter(move |row| row.inside == inside)
}

/// Share of the bound against overcommit.
fn bound(sweep: &Sweep, report: &Report) -> (String, Vec<Panel>) {
    let shares = report.rows.iter().filter_map(|row| row.share_of_bound).filter(|&share| share > 0.0);
    let (least, most) = shares.fold((0.1, 1.0), |(least, most): (f64, f64), share| (least.min(share), most.max(share)));
    let mut overcommits: Vec<f64> = report.rows.iter().map(|row| row.overcommit).collect();
    overcommits.sort_by(f64::total_cmp);
    overcommits.dedup();
    let panels = sweep.sections().map(|sections| Panel {
        title: subtitle(sweep, &sections),
        x: Axis {
            title: "overcommit (vCPUs per CPU)".into(),
            from: overcommits.first().map_or(0.0, |x| x.log2()) - 0.15,
            to: overcommits.last().map_or(1.0, |x| x.log2()) + 0.15,
            ticks: overcommits.iter().map(|&x| (x.log2(), format!("{x}x"))).collect(),
        },
        y: percent_axis("throughput, share of the bound", least, most * 1.2, true),
        lines: legend(report)
            .into_iter()
            .map(|lock| {
                let rows = rows_of(report, &sections).filter(|row| row.lock == lock);
                let points: Vec<_> = rows
                    .filter_map(|row| Some((row.overcommit.log2(), row.share_of_bound?.max(f64::MIN_POSITIVE).log10())))
                    .collect();
                Line { lock, markers: points.clone(), points }
            })
            .collect(),
    });
    ("Throughput under overcommit; bound = best lock at one vCPU per CPU".into(), panels.into())
}

/// Share of acquisitions that waited longer, at the highest overcommit.
fn waits(sweep: &Sweep, report: &Report) -> (String, Vec<Panel>) {
    let highest = report.rows.iter().map(|row| row.overcommit).fold(0.0, f64::max);
    let measured = || report.rows.iter().filter(|row| row.overcommit == highest && !row.waits.is_empty());
    let longest = measured().map(|row| row.wait_us.max).fold(10.0, f64::max);
    let most: u64 = measured().map(|row| row.waits.iter().map(|bucket| bucket.count).sum()).max().unwrap_or(10);
    let least_share = (1.0 / most as f64).clamp(1e-6, 0.1);
    let (from, to) = (-2.0, (longest.log10() + 0.05).ceil());
    let panels = sweep.sections().map(|sections| Panel {
        title: subtitle(sweep, &sections),
        x: Axis {
            title: "wait for the lock, µs".into(),
            from,
            to,
            ticks: (from as i32..=to as i32).map(|exponent| (exponent.into(), power_of_ten(exponent))).collect(),
        },
        y: percent_axis("share of acquisitions that waited longer", least_share, 1.0, false),
        lines: legend(report)
            .into_iter()
            .zip(0..)
            .map(|(lock, index)| {
                let row = rows_of(report, &sections).find(|row| row.lock == lock && row.overcommit == highest);
                let points = row.map_or(Vec::new(), |row| longer(&row.waits, row.wait_us.max));
                let points: Vec<_> = points
                    .into_iter()
                    .map(|(x, y)| (x.log10().max(from), y.log10()))
                    .filter(|(_, y)| *y > least_share.log10() - 0.01)
                    .collect();
                Line { lock, markers: along(&points, index), points }
            })
            .collect(),
    });
    (format!("Waits for the lock at {highest}x overcommit"), panels.into())
}

fn subtitle(sweep: &Sweep, sections: &Sections) -> String {
    format!("{} sections: {:.2} µs inside, {:.2} µs outside", sections.name, sweep.inside_us(sections), sweep.outside_us(sections))
}

/// For each length of wait, the share of all that were longer; ends at the longest.
fn longer(waits: &[WaitBucket], longest_us: f64) -> Vec<(f64, f64)> {
    let all: u64 = waits.iter().map(|bucket| bucket.count).sum();
    let mut left = all;
    let mut points = Vec::with_capacity(2 * waits.len());
    for bucket in waits {
        // Falls within the bucket, and stays level up to the next.
        points.push((bucket.from_us, left as f64 / all as f64));
        left -= bucket.count;
        let last = left == 0;
        let share = if last { bucket.count } else { left } as f64 / all as f64;
        points.push((if last { longest_us.clamp(bucket.from_us, bucket.to_us) } else { bucket.to_us }, share));
    }
    points
}

/// Points for markers along a line, each at another place than those of other lines; the last is the line's end.
fn along(points: &[(f64, f64)], index: u32) -> Vec<(f64, f64)> {
    /// Decades of wait between two markers of a line.
    const STEP: f64 = 1.0;
    let mut next = points.first().map_or(0.0, |(x, _)| x + STEP * f64::from(index % 7) / 7.0);
    let mut markers = Vec::new();
    for &(x, y) in points {
        if x >= next {
            markers.push((x, y));
            next = x + STEP;
        }
    }
    markers.extend(points.last());
    markers
}

/// A logarithmic axis of shares, from below `least` to `most`. `fine`: with steps between 10 % and 100 %.
fn percent_axis(title: &str, least: f64, most: f64, fine: bool) -> Axis {
    let decades = least.log10().floor() as i32;
    let all = (decades..=0).flat_map(|decade| {
        // Over few decades there is room for steps in all of them.
        let steps: &[f64] = if decades >= -2 || (fine && decade == -1) { &[1.0, 2.0, 5.0] } else { &[1.0] };
        steps.iter().map(move |step| step * 10f64.powi(decade))
    });
    let below = all.clone().filter(|&share| share <= least).fold(10f64.powi(decades), f64::max);
    let ticks = all.filter(|share| (below..=most).contains(share)).map(|share| (share.log10(), percent(share)));
    Axis { title: title.into(), from: below.log10(), to: most.log10(), ticks: ticks.collect() }
}

fn percent(share: f64) -> String {
    let percent = 100.0 * share;
    // As many digits as a power of ten needs.
    let digits = (-(percent * 1.001).log10().floor()).max(0.0) as usize;
    format!("{percent:.digits$} %")
}

fn power_of_ten(exponent: i32) -> String {
    match exponent {
        0..=2 => format!("{}", 10u32.pow(exponent as u32)),
        3..=5 => format!("{} k", 10u32.pow(exponent as u32 - 3)),
        6..=9 => format!("{} M", 10u32.pow(exponent as u32 - 6)),
        _ => format!("{:.*}", exponent.unsigned_abs() as usize, 10f64.powi(exponent)),
    }
}

/// How the line of a lock looks.
struct Look {
    color: RGBColor,
    marker: Marker,
    width: u32,
}

#[derive(Clone, Copy)]
enum Marker {
    Circle,
    Square,
    Diamond,
    Up,
    Down,
    Cross,
    Plus,
}

impl Look {
    /// Colours that people with any kind of colour vision can tell apart (Okabe and Ito's palette); ours are the thick lines.
    fn of(lock: &str) -> Self {
        let (color, marker, width) = match lock {
            "spin-ticket" => (RGBColor(0xd5, 0x5e, 0x00), Marker::Square, 2),
            "spin-tas" => (RGBColor(0xe6, 0x9f, 0x00), Marker::Up, 2),
            "mcs" => (RGBColor(0xcc, 0x79, 0xa7), Marker::Down, 2),
            "ticket" => (RGBColor(0x00, 0x72, 0xb2), Marker::Diamond, 3),
            "preemptable" => (RGBColor(0x00, 0x9e, 0x73), Marker::Circle, 3),
            "parking-lot" => (RGBColor(0x56, 0xb4, 0xe9), Marker::Cross, 2),
            _ => (RGBColor(0x55, 0x55, 0x55), Marker::Plus, 2),
        };
        Self { color, marker, width }
    }
}

/// A scale on which everything is linear: logarithms have been taken.
struct Axis {
    title: String,
    from: f64,
    to: f64,
    ticks: Vec<(f64, String)>,
}

impl Axis {
    /// Where a value is: 0 at the beginning of the axis, 1 at its end. Values outside are put to the edge.
    fn at(&self, value: f64) -> f64 {
        ((value - self.from) / (self.to - self.from)).clamp(0.0, 1.0)
    }
}

struct Line {
    lock: &'static str,
    points: Vec<(f64, f64)>,
    markers: Vec<(f64, f64)>,
}

struct Panel {
    title: String,
    x: Axis,
    y: Axis,
    lines: Vec<Line>,
}

struct Picture<'a> {
    title: String,
    machine: &'a str,
    legend: Vec<&'static str>,
    panels: Vec<Panel>,
}

/// Size of a picture; a PNG has [`PNG_SCALE`] pixels for each unit.
const SIZE: (u32, u32) = (1280, 600);
const PNG_SCALE: u32 = 2;
/// How far above its place text stands in a PNG, in percent of its size: the library centres what it takes for the height.
const PNG_SINK: i32 = 25;
/// Text is in this family; in PNG it is the font registered under this name.
const FAMILY: &str = "sans-serif";
const GRID: RGBColor = RGBColor(0xdd, 0xdd, 0xdd);
const FRAME: RGBColor = RGBColor(0x77, 0x77, 0x77);

type Drawn<DB> = Result<(), DrawingAreaErrorKind<<DB as DrawingBackend>::ErrorType>>;

impl Picture<'_> {
    fn svg(&self) -> Result<Vec<u8>, String> {
        let mut text = String::new();
        self.draw(SVGBackend::with_string(&mut text, SIZE), 1, 0)?;
        Ok(text.into_bytes())
    }

    fn png(&self) -> Result<Vec<u8>, String> {
        let (width, height) = (SIZE.0 * PNG_SCALE, SIZE.1 * PNG_SCALE);
        let mut pixels = vec![0; (3 * width * height) as usize];
        self.draw(BitMapBackend::with_buffer(&mut pixels, (width, height)), PNG_SCALE, PNG_SINK)?;
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, width, height);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        let written = encoder.write_header().and_then(|mut writer| writer.write_image_data(&pixels));
        written.map_err(|error| error.to_string())?;
        Ok(bytes)
    }

    fn draw<DB: DrawingBackend>(&self, backend: DB, scale: u32, sink: i32) -> Result<(), String> {
        register_font(FAMILY, FontStyle::Normal, epaint_default_fonts::UBUNTU_LIGHT).map_err(|_| "the font is not valid")?;
        let canvas = Canvas { area: backend.into_drawing_area(), scale: scale as i32, sink };
        self.draw_on(&canvas).map_err(|error| error.to_string())
    }

    fn draw_on<DB: DrawingBackend>(&self, canvas: &Canvas<DB>) -> Drawn<DB> {
        let (width, height) = (SIZE.0 as i32, SIZE.1 as i32);
        canvas.area.fill(&WHITE)?;
        canvas.text(&self.title, 22, BLACK, (width / 2, 24), HPos::Center)?;
        canvas.text(self.machine, 15, FRAME, (width / 2, 50), HPos::Center)?;
        let each = width / self.panels.len().max(1) as i32;
        for (panel, left) in self.panels.iter().zip((0..).step_by(each as usize)) {
            panel.draw(canvas, (left + 88, 102), (left + each - 20, height - 112))?;
        }
        self.draw_legend(canvas, height - 26)?;
        canvas.area.present()
    }

    fn draw_legend<DB: DrawingBackend>(&self, canvas: &Canvas<DB>, y: i32) -> Drawn<DB> {
        const SAMPLE: i32 = 44;
        const GAP: i32 = 30;
        let style = canvas.style(16, BLACK);
        let widths: Vec<i32> = self
            .legend
            .iter()
            .map(|lock| Ok(SAMPLE + 8 + canvas.area.estimate_text_size(lock, &style)?.0 as i32 / canvas.scale))
            .collect::<Result<_, _>>()?;
        let all = widths.iter().sum::<i32>() + GAP * (widths.len() as i32 - 1).max(0);
        let mut x = (SIZE.0 as i32 - all) / 2;
        for (lock, width) in self.legend.iter().zip(widths) {
            let look = Look::of(lock);
            canvas.line(&[(x, y), (x + SAMPLE, y)], look.color, look.width)?;
            canvas.marker((x + SAMPLE / 2, y), &look)?;
            canvas.text(lock, 16, BLACK, (x + SAMPLE + 8, y), HPos::Left)?;
            x += width + GAP;
        }
        Ok(())
    }
}

impl Panel {
    fn draw<DB: DrawingBackend>(&self, canvas: &Canvas<DB>, from: (i32, i32), to: (i32, i32)) -> Drawn<DB> {
        let x_at = |x: f64| from.0 + (self.x.at(x) * f64::from(to.0 - from.0)).round() as i32;
        let y_at = |y: f64| to.1 - (self.y.at(y) * f64::from(to.1 - from.1)).round() as i32;
        let middle = ((from.0 + to.0) / 2, (from.1 + to.1) / 2);
        canvas.text(&self.title, 17, BLACK, (middle.0, from.1 - 18), HPos::Center)?;
        for (x, label) in &self.x.ticks {
            canvas.line(&[(x_at(*x), from.1), (x_at(*x), to.1)], GRID, 1)?;
            canvas.text(label, 15, BLACK, (x_at(*x), to.1 + 16), HPos::Center)?;
        }
        for (y, label) in &self.y.ticks {
            // 100 % stands out.
            let color = if *y == 0.0 { FRAME } else { GRID };
            canvas.line(&[(from.0, y_at(*y)), (to.0, y_at(*y))], color, 1)?;
            canvas.text(label, 15, BLACK, (from.0 - 8, y_at(*y)), HPos::Right)?;
        }
        canvas.frame(from, to)?;
        canvas.text(&self.x.title, 16, BLACK, (middle.0, to.1 + 42), HPos::Center)?;
        canvas.upwards(&self.y.title, 16, (from.0 - 74, middle.1))?;
        // The last is on top: our locks, whose lines are thicker.
        let mut lines: Vec<_> = self.lines.iter().map(|line| (line, Look::of(line.lock))).collect();
        lines.sort_by_key(|(_, look)| look.width);
        for (line, look) in &lines {
            let points: Vec<_> = line.points.iter().map(|(x, y)| (x_at(*x), y_at(*y))).collect();
            canvas.line(&points, look.color, look.width)?;
        }
        for (line, look) in &lines {
            for (x, y) in &line.markers {
                canvas.marker((x_at(*x), y_at(*y)), look)?;
            }
        }
        Ok(())
    }
}

/// A drawing area whose units are larger than pixels.
struct Canvas<DB: DrawingBackend> {
    area: DrawingArea<DB, Shift>,
    scale: i32,
    /// How much lower to put text, in percent of its size.
    sink: i32,
}

impl<DB: DrawingBackend> Canvas<DB> {
    fn at(&self, (x, y): (i32, i32)) -> (i32, i32) {
        (x * self.scale, y * self.scale)
    }

    fn style(&self, size: i32, color: RGBColor) -> TextStyle<'static> {
        (FAMILY, size * self.scale).into_font().color(&color)
    }

    fn text(&self, text: &str, size: i32, color: RGBColor, at: (i32, i32), anchor: HPos) -> Drawn<DB> {
        let (x, y) = self.at(at);
        let sink = size * self.scale * self.sink / 100;
        self.area.draw_text(text, &self.style(size, color).pos(Pos::new(anchor, VPos::Center)), (x, y + sink))
    }

    /// Text that is read from below.
    fn upwards(&self, text: &str, size: i32, at: (i32, i32)) -> Drawn<DB> {
        let style = TextStyle::from((FAMILY, size * self.scale).into_font().transform(FontTransform::Rotate270));
        let (x, y) = self.at(at);
        let sink = size * self.scale * self.sink / 100;
        self.area.draw_text(text, &style.pos(Pos::new(HPos::Center, VPos::Center)), (x + sink, y))
    }

    fn line(&self, points: &[(i32, i32)], color: RGBColor, width: u32) -> Drawn<DB> {
        let points: Vec<_> = points.iter().map(|&point| self.at(point)).collect();
        self.area.draw(&PathElement::new(points, color.stroke_width(width * self.scale as u32)))
    }

    fn frame(&self, from: (i32, i32), to: (i32, i32)) -> Drawn<DB> {
        self.area.draw(&Rectangle::new([self.at(from), self.at(to)], FRAME.stroke_width(self.scale as u32)))
    }

    fn marker(&self, center: (i32, i32), look: &Look) -> Drawn<DB> {
        let (x, y) = self.at(center);
        // In tenths of a unit, so that all shapes look about as large.
        let r = |tenths: i32| tenths * self.scale / 10;
        let polygon = |points: Vec<(i32, i32)>| self.area.draw(&Polygon::new(points, look.color.filled()));
        let stroke = |from, to| self.area.draw(&PathElement::new([from, to], look.color.stroke_width(3 * self.scale as u32)));
        match look.marker {
            Marker::Circle => self.area.draw(&Circle::new((x, y), r(60), look.color.filled())),
            Marker::Square => {
                self.area.draw(&Rectangle::new([(x - r(50), y - r(50)), (x + r(50), y + r(50))], look.color.filled()))
            }
            Marker::Diamond => polygon(vec![(x, y - r(75)), (x + r(75), y), (x, y + r(75)), (x - r(75), y)]),
            Marker::Up => polygon(vec![(x, y - r(70)), (x + r(65), y + r(50)), (x - r(65), y + r(50))]),
            Marker::Down => polygon(vec![(x, y + r(70)), (x + r(65), y - r(50)), (x - r(65), y - r(50))]),
            Marker::Cross => {
                stroke((x - r(55), y - r(55)), (x + r(55), y + r(55)))?;
                stroke((x - r(55), y + r(55)), (x + r(55), y - r(55)))
            }
            Marker::Plus => {
                stroke((x - r(70), y), (x + r(70), y))?;
                stroke((x, y - r(70)), (x, y + r(70)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_of_longer_waits_falls_from_one_and_ends_at_the_longest() {
        let waits = [(0.1, 90), (1.0, 9), (50.0, 1)].map(|(from_us, count)| WaitBucket { from_us, to_us: 1.1 * from_us, count });
        let points = longer(&waits, 52.0);
        assert_eq!(points.iter().map(|(_, share)| *share).collect::<Vec<_>>(), [1.0, 0.1, 0.1, 0.01, 0.01, 0.01]);
        assert!(points.is_sorted_by(|(x, _), (y, _)| x < y), "{points:?}");
        assert_eq!(points.last().unwrap().0, 52.0);
        assert_eq!(longer(&[], 0.0), []);
    }

    #[test]
    fn ticks_of_shares_are_round_and_cover_the_least() {
        let labels =
            |least, most| percent_axis("", least, most, true).ticks.into_iter().map(|(_, label)| label).collect::<Vec<_>>();
        assert_eq!(labels(0.03, 1.5), ["2 %", "5 %", "10 %", "20 %", "50 %", "100 %"]);
        assert_eq!(labels(0.0001, 1.0), ["0.01 %", "0.1 %", "1 %", "10 %", "20 %", "50 %", "100 %"]);
        assert_eq!(labels(0.5, 2.4), ["50 %", "100 %", "200 %"]);
        assert_eq!(labels(0.5, 1.5), ["50 %", "100 %"]);
        assert_eq!([-2, 0, 3, 5, 6].map(power_of_ten), ["0.01", "1", "1 k", "100 k", "1 M"]);
    }

    #[test]
    fn a_value_outside_its_axis_is_drawn_at_the_edge() {
        let axis = percent_axis("", 0.1, 1.0, false);
        assert_eq!([-9.0, -1.0, -0.5, 0.0, f64::INFINITY].map(|y| axis.at(y)), [0.0, 0.0, 0.5, 1.0, 1.0]);
    }
}
