//! What all pictures are drawn on: lines, text, markers and legends, in SVG and in PNG.

use super::Drawing;
use plotters::coord::Shift;
use plotters::element::{Circle, PathElement, Polygon, Rectangle};
use plotters::prelude::{BitMapBackend, DrawingArea, DrawingAreaErrorKind, DrawingBackend, IntoDrawingArea, SVGBackend};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{BLACK, Color, FontStyle, FontTransform, IntoFont, RGBColor, TextStyle, WHITE, register_font};

/// A PNG has so many pixels for each unit.
pub(super) const PNG_SCALE: u32 = 2;
/// How far above its place text stands in a PNG, in percent of its size: the library centres what it takes for the height.
const PNG_SINK: i32 = 25;
/// Text is in this family; in PNG it is the font registered under this name.
const FAMILY: &str = "sans-serif";

pub(super) const GRID: RGBColor = RGBColor(0xdd, 0xdd, 0xdd);
pub(super) const FRAME: RGBColor = RGBColor(0x77, 0x77, 0x77);

/// What drawing comes to.
pub type Drawn<DB> = Result<(), DrawingAreaErrorKind<<DB as DrawingBackend>::ErrorType>>;

pub(super) fn svg(drawing: &impl Drawing) -> Result<Vec<u8>, String> {
    let mut text = String::new();
    draw(drawing, SVGBackend::with_string(&mut text, drawing.size()), (1, 0, 0))?;
    Ok(text.into_bytes())
}

pub(super) fn png(drawing: &impl Drawing) -> Result<Vec<u8>, String> {
    let (width, height) = drawing.size();
    let (width, height) = (width * PNG_SCALE, height * PNG_SCALE);
    let mut pixels = vec![0; 3 * width as usize * height as usize];
    draw(drawing, BitMapBackend::with_buffer(&mut pixels, (width, height)), (PNG_SCALE as i32, PNG_SINK, 1))?;
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let written = encoder.write_header().and_then(|mut writer| writer.write_image_data(&pixels));
    written.map_err(|error| error.to_string())?;
    Ok(bytes)
}

fn draw<DB: DrawingBackend>(drawing: &impl Drawing, backend: DB, (scale, sink, inclusive): (i32, i32, i32)) -> Result<(), String> {
    register_font(FAMILY, FontStyle::Normal, epaint_default_fonts::UBUNTU_LIGHT).map_err(|_| "the font is not valid")?;
    let canvas = Canvas { area: backend.into_drawing_area(), scale, sink, inclusive };
    let drawn = canvas.area.fill(&WHITE).and_then(|()| drawing.draw_on(&canvas)).and_then(|()| canvas.area.present());
    drawn.map_err(|error| error.to_string())
}

/// A drawing area whose units may be larger than pixels.
pub struct Canvas<DB: DrawingBackend> {
    area: DrawingArea<DB, Shift>,
    scale: i32,
    /// How much lower to put text, in percent of its size.
    sink: i32,
    /// 1 if rectangles contain their right and lower edges.
    inclusive: i32,
}

impl<DB: DrawingBackend> Canvas<DB> {
    /// Pixels for each unit.
    pub(super) fn scale(&self) -> i32 {
        self.scale
    }

    fn at(&self, (x, y): (i32, i32)) -> (i32, i32) {
        (x * self.scale, y * self.scale)
    }

    fn style(&self, size: i32, color: RGBColor) -> TextStyle<'static> {
        (FAMILY, size * self.scale).into_font().color(&color)
    }

    pub(super) fn text(&self, text: &str, size: i32, color: RGBColor, at: (i32, i32), anchor: HPos) -> Drawn<DB> {
        let (x, y) = self.at(at);
        let sink = size * self.scale * self.sink / 100;
        self.area.draw_text(text, &self.style(size, color).pos(Pos::new(anchor, VPos::Center)), (x, y + sink))
    }

    /// Text that is read from below.
    pub(super) fn upwards(&self, text: &str, size: i32, at: (i32, i32)) -> Drawn<DB> {
        let style = TextStyle::from((FAMILY, size * self.scale).into_font().transform(FontTransform::Rotate270));
        let (x, y) = self.at(at);
        let sink = size * self.scale * self.sink / 100;
        self.area.draw_text(text, &style.pos(Pos::new(HPos::Center, VPos::Center)), (x + sink, y))
    }

    pub(super) fn line(&self, points: &[(i32, i32)], color: RGBColor, width: u32) -> Drawn<DB> {
        let points: Vec<_> = points.iter().map(|&point| self.at(point)).collect();
        self.area.draw(&PathElement::new(points, color.stroke_width(width * self.scale as u32)))
    }

    pub(super) fn frame(&self, from: (i32, i32), to: (i32, i32)) -> Drawn<DB> {
        self.area.draw(&Rectangle::new([self.at(from), self.at(to)], FRAME.stroke_width(self.scale as u32)))
    }

    /// A filled rectangle, in pixels, without its right and lower edges.
    pub(super) fn fill(&self, (left, top): (i32, i32), (right, bottom): (i32, i32), color: RGBColor) -> Drawn<DB> {
        let end = (right - self.inclusive, bottom - self.inclusive);
        self.area.draw(&Rectangle::new([(left, top), end], color.filled()))
    }

    /// A filled polygon, in pixels.
    pub(super) fn polygon(&self, points: Vec<(i32, i32)>, color: RGBColor) -> Drawn<DB> {
        self.area.draw(&Polygon::new(points, color.filled()))
    }

    pub(super) fn marker(&self, center: (i32, i32), look: &Look) -> Drawn<DB> {
        let (x, y) = self.at(center);
        // In tenths of a unit, so that all shapes look about as large.
        let r = |tenths: i32| tenths * self.scale / 10;
        let stroke = |from, to| self.area.draw(&PathElement::new([from, to], look.color.stroke_width(3 * self.scale as u32)));
        match look.marker {
            Marker::Circle => self.area.draw(&Circle::new((x, y), r(60), look.color.filled())),
            Marker::Square => self.fill((x - r(50), y - r(50)), (x + r(50), y + r(50)), look.color),
            Marker::Diamond => self.polygon(vec![(x, y - r(75)), (x + r(75), y), (x, y + r(75)), (x - r(75), y)], look.color),
            Marker::Up => self.polygon(vec![(x, y - r(70)), (x + r(65), y + r(50)), (x - r(65), y + r(50))], look.color),
            Marker::Down => self.polygon(vec![(x, y + r(70)), (x + r(65), y - r(50)), (x - r(65), y - r(50))], look.color),
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

/// How a line of a chart looks.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    pub(super) color: RGBColor,
    pub(super) marker: Marker,
    pub(super) width: u32,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Marker {
    Circle,
    Square,
    Diamond,
    Up,
    Down,
    Cross,
    Plus,
}

/// Colours that people with any kind of colour vision can tell apart (Okabe and Ito's palette).
const LOOKS: [(RGBColor, Marker); 7] = [
    (RGBColor(0xd5, 0x5e, 0x00), Marker::Square),
    (RGBColor(0xe6, 0x9f, 0x00), Marker::Up),
    (RGBColor(0xcc, 0x79, 0xa7), Marker::Down),
    (RGBColor(0x00, 0x72, 0xb2), Marker::Diamond),
    (RGBColor(0x00, 0x9e, 0x73), Marker::Circle),
    (RGBColor(0x56, 0xb4, 0xe9), Marker::Cross),
    (RGBColor(0x55, 0x55, 0x55), Marker::Plus),
];

impl Look {
    /// That of a lock, the same in all pictures; ours are the thick lines. Other names look by their place in the picture.
    pub fn of(name: &str, place: usize) -> Self {
        let (index, width) = match name {
            "spin-ticket" | "plain-ticket" => (0, 2),
            "spin-tas" | "test-and-set" => (1, 2),
            "mcs" | "queued" => (2, 2),
            "ticket" => (3, 3),
            "preemptable" => (4, 3),
            "parking-lot" | "classic-ticket" => (5, 2),
            "std" => (6, 2),
            _ => (place % LOOKS.len(), 2),
        };
        let (color, marker) = LOOKS[index];
        Self { color, marker, width }
    }
}

/// What stands before a name in a legend.
pub(super) enum Sample {
    /// A line with a marker.
    Line(Look),
    /// Colours side by side, in a frame.
    Colors(Vec<RGBColor>),
    /// A line in the middle of a bar of another colour.
    Stripe(RGBColor, RGBColor),
    /// A marker alone.
    Marker(Look),
}

/// A legend of several rows, each centred.
pub(super) struct Legend {
    rows: Vec<Vec<(Sample, String)>>,
    width: i32,
}

const SAMPLE: i32 = 40;
const GAP: i32 = 28;
/// Of a legend.
pub(super) const ROW: i32 = 26;

fn width_of(name: &str) -> i32 {
    // The library's estimate differs between backends, and places have to be the same.
    SAMPLE + 8 + 13 * name.chars().count() as i32 / 2
}

impl Legend {
    /// As many rows as are needed in this width.
    pub(super) fn new(entries: Vec<(Sample, String)>, width: i32) -> Self {
        let mut rows: Vec<Vec<_>> = Vec::new();
        let mut left = 0;
        for entry in entries {
            let needed = width_of(&entry.1) + GAP;
            if needed > left || rows.is_empty() {
                rows.push(Vec::new());
                left = width;
            }
            left -= needed;
            if let Some(row) = rows.last_mut() {
                row.push(entry);
            }
        }
        Self { rows, width }
    }

    pub(super) fn height(&self) -> i32 {
        self.rows.len() as i32 * ROW
    }

    /// Draws it from `top` on.
    pub(super) fn draw<DB: DrawingBackend>(&self, canvas: &Canvas<DB>, top: i32) -> Drawn<DB> {
        for (row, y) in self.rows.iter().zip((top + ROW / 2..).step_by(ROW as usize)) {
            let all: i32 = row.iter().map(|(_, name)| width_of(name) + GAP).sum::<i32>() - GAP;
            let mut x = (self.width - all) / 2;
            for (sample, name) in row {
                sample.draw(canvas, x, y)?;
                canvas.text(name, 16, BLACK, (x + SAMPLE + 8, y), HPos::Left)?;
                x += width_of(name) + GAP;
            }
        }
        Ok(())
    }
}

impl Sample {
    fn draw<DB: DrawingBackend>(&self, canvas: &Canvas<DB>, x: i32, y: i32) -> Drawn<DB> {
        let bar = |from: i32, to: i32, half: i32, color| canvas.fill(canvas.at((from, y - half)), canvas.at((to, y + half)), color);
        match self {
            Self::Line(look) => {
                canvas.line(&[(x, y), (x + SAMPLE, y)], look.color, look.width)?;
                canvas.marker((x + SAMPLE / 2, y), look)
            }
            Self::Colors(colors) => {
                let edge = |n: usize| x + SAMPLE * n as i32 / colors.len().max(1) as i32;
                for (n, color) in colors.iter().enumerate() {
                    bar(edge(n), edge(n + 1), 7, *color)?;
                }
                canvas.frame((x, y - 7), (x + SAMPLE, y + 7))
            }
            Self::Stripe(stripe, ground) => {
                bar(x, x + SAMPLE, 7, *ground)?;
                bar(x, x + SAMPLE, 3, BLACK)?;
                bar(x, x + SAMPLE, 2, *stripe)
            }
            Self::Marker(look) => canvas.marker((x + SAMPLE / 2 + 8, y), look),
        }
    }
}
