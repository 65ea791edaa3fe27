//! Charts: panels side by side, with lines in them, and a legend below.

use super::Drawing;
use super::canvas::{Canvas, Drawn, FRAME, GRID, Legend, Look, Sample};
use plotters::prelude::DrawingBackend;
use plotters::style::BLACK;
use plotters::style::text_anchor::HPos;

/// A scale on which everything is linear: logarithms have been taken.
#[derive(Clone, Debug)]
pub struct Axis {
    /// What it shows.
    pub title: String,
    /// Its beginning.
    pub from: f64,
    /// Its end.
    pub to: f64,
    /// Where labels stand, and which.
    pub ticks: Vec<(f64, String)>,
}

impl Axis {
    /// Where a value is: 0 at the beginning of the axis, 1 at its end. Values outside are put to the edge.
    fn at(&self, value: f64) -> f64 {
        ((value - self.from) / (self.to - self.from)).clamp(0.0, 1.0)
    }

    /// Overcommit: logarithmic to the base of two, with a label for each of these.
    pub fn overcommit(values: impl IntoIterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        values.dedup();
        Self {
            title: "overcommit (vCPUs per CPU)".into(),
            from: values.first().map_or(0.0, |x| x.log2()) - 0.15,
            to: values.last().map_or(1.0, |x| x.log2()) + 0.15,
            ticks: values.iter().map(|&x| (x.log2(), format!("{}x", (100.0 * x).round() / 100.0))).collect(),
        }
    }

    /// Shares: logarithmic to the base of ten, from below `least` to `most`. `fine`: with steps between 10 % and 100 %.
    pub fn percent(title: &str, least: f64, most: f64, fine: bool) -> Self {
        let decades = least.log10().floor() as i32;
        let all = (decades..=0).flat_map(|decade| {
            // Over few decades there is room for steps in all of them.
            let steps: &[f64] = if decades >= -2 || (fine && decade == -1) { &[1.0, 2.0, 5.0] } else { &[1.0] };
            steps.iter().map(move |step| step * 10f64.powi(decade))
        });
        let below = all.clone().filter(|&share| share <= least).fold(10f64.powi(decades), f64::max);
        let ticks = all.filter(|share| (below..=most).contains(share)).map(|share| (share.log10(), percent(share)));
        Self { title: title.into(), from: below.log10(), to: most.log10(), ticks: ticks.collect() }
    }
}

fn percent(share: f64) -> String {
    let percent = 100.0 * share;
    // As many digits as a power of ten needs.
    let digits = (-(percent * 1.001).log10().floor()).max(0.0) as usize;
    format!("{percent:.digits$} %")
}

/// A label of a logarithmic axis.
pub fn power_of_ten(exponent: i32) -> String {
    match exponent {
        0..=2 => format!("{}", 10u32.pow(exponent as u32)),
        3..=5 => format!("{} k", 10u32.pow(exponent as u32 - 3)),
        6..=9 => format!("{} M", 10u32.pow(exponent as u32 - 6)),
        _ => format!("{:.*}", exponent.unsigned_abs() as usize, 10f64.powi(exponent)),
    }
}

/// One line.
#[derive(Clone, Debug)]
pub struct Line {
    /// In the legend.
    pub name: String,
    /// How it looks.
    pub look: Look,
    /// Its corners.
    pub points: Vec<(f64, f64)>,
    /// Its markers.
    pub markers: Vec<(f64, f64)>,
}

/// One pair of axes.
#[derive(Clone, Debug)]
pub struct Panel {
    /// Above it.
    pub title: String,
    /// To the right.
    pub x: Axis,
    /// Upwards.
    pub y: Axis,
    /// What it shows.
    pub lines: Vec<Line>,
}

/// A whole picture.
#[derive(Clone, Debug)]
pub struct Chart {
    /// Above it.
    pub title: String,
    /// Where the numbers come from.
    pub subtitle: String,
    /// Side by side.
    pub panels: Vec<Panel>,
    /// In units.
    pub size: (u32, u32),
}

impl Chart {
    /// All names, in the order in which they first occur.
    fn legend(&self) -> Legend {
        let mut entries: Vec<(Sample, String)> = Vec::new();
        for line in self.panels.iter().flat_map(|panel| &panel.lines) {
            if !entries.iter().any(|(_, name)| *name == line.name) {
                entries.push((Sample::Line(line.look), line.name.clone()));
            }
        }
        Legend::new(entries, self.size.0 as i32)
    }
}

impl Drawing for Chart {
    fn size(&self) -> (u32, u32) {
        self.size
    }

    fn draw_on<DB: DrawingBackend>(&self, canvas: &Canvas<DB>) -> Drawn<DB> {
        let (width, height) = (self.size.0 as i32, self.size.1 as i32);
        canvas.text(&self.title, 22, BLACK, (width / 2, 24), HPos::Center)?;
        canvas.text(&self.subtitle, 15, FRAME, (width / 2, 50), HPos::Center)?;
        let legend = self.legend();
        let bottom = height - 12 - legend.height();
        let each = width / self.panels.len().max(1) as i32;
        for (panel, left) in self.panels.iter().zip((0..).step_by(each as usize)) {
            panel.draw(canvas, (left + 88, 102), (left + each - 20, bottom - 72))?;
        }
        legend.draw(canvas, bottom)
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
        let mut lines: Vec<_> = self.lines.iter().collect();
        lines.sort_by_key(|line| line.look.width);
        for line in &lines {
            let points: Vec<_> = line.points.iter().map(|(x, y)| (x_at(*x), y_at(*y))).collect();
            canvas.line(&points, line.look.color, line.look.width)?;
        }
        for line in &lines {
            for (x, y) in &line.markers {
                canvas.marker((x_at(*x), y_at(*y)), &line.look)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_of_shares_are_round_and_cover_the_least() {
        let labels =
            |least, most| Axis::percent("", least, most, true).ticks.into_iter().map(|(_, label)| label).collect::<Vec<_>>();
        assert_eq!(labels(0.03, 1.5), ["2 %", "5 %", "10 %", "20 %", "50 %", "100 %"]);
        assert_eq!(labels(0.0001, 1.0), ["0.01 %", "0.1 %", "1 %", "10 %", "20 %", "50 %", "100 %"]);
        assert_eq!(labels(0.5, 2.4), ["50 %", "100 %", "200 %"]);
        assert_eq!(labels(0.5, 1.5), ["50 %", "100 %"]);
        assert_eq!([-2, 0, 3, 5, 6].map(power_of_ten), ["0.01", "1", "1 k", "100 k", "1 M"]);
    }

    #[test]
    fn a_value_outside_its_axis_is_drawn_at_the_edge() {
        let axis = Axis::percent("", 0.1, 1.0, false);
        assert_eq!([-9.0, -1.0, -0.5, 0.0, f64::INFINITY].map(|y| axis.at(y)), [0.0, 0.0, 0.5, 1.0, 1.0]);
    }
}
