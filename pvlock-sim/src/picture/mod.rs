//! Pictures: charts of lines, and maps of who ran where. Each as SVG or PNG, by the ending of its file's name.
//!
//! Axes and legend are drawn here, from lines and text: they have to be the same in all pictures and both formats, and need
//! logarithmic scales to the base of two and of ten.

mod canvas;
pub mod chart;
pub mod map;

pub use canvas::{Canvas, Drawn, Look};
use plotters::prelude::DrawingBackend;
use std::path::{Path, PathBuf};

/// What can go wrong with a picture.
#[derive(Debug, thiserror::Error)]
pub enum PictureError {
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
    /// Neither SVG nor PNG.
    #[error("{path}: the name of a picture ends in .png or .svg", path = path.display())]
    Ending {
        /// The picture.
        path: PathBuf,
    },
}

/// Something that can be drawn on either.
pub trait Drawing {
    /// In units; a PNG has several pixels for each.
    fn size(&self) -> (u32, u32);

    /// Draws it on white.
    ///
    /// # Errors
    ///
    /// The drawing library's.
    fn draw_on<DB: DrawingBackend>(&self, canvas: &Canvas<DB>) -> Drawn<DB>;
}

/// How a picture is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Lines and text.
    Svg,
    /// Pixels.
    Png,
}

impl Format {
    /// By the ending of the file's name.
    ///
    /// # Errors
    ///
    /// [`PictureError::Ending`]
    pub fn of(path: &Path) -> Result<Self, PictureError> {
        match path.extension().and_then(|ending| ending.to_str()) {
            Some("svg") => Ok(Self::Svg),
            Some("png") => Ok(Self::Png),
            _ => Err(PictureError::Ending { path: path.to_owned() }),
        }
    }

    /// The picture's bytes.
    ///
    /// # Errors
    ///
    /// What the drawing library says.
    pub fn bytes(self, drawing: &impl Drawing) -> Result<Vec<u8>, String> {
        match self {
            Self::Svg => canvas::svg(drawing),
            Self::Png => canvas::png(drawing),
        }
    }
}

/// Draws into a file.
///
/// # Errors
///
/// See [`PictureError`].
pub fn save(path: &Path, drawing: &impl Drawing) -> Result<(), PictureError> {
    let bytes = Format::of(path)?.bytes(drawing).map_err(|why| PictureError::Draw { path: path.to_owned(), why })?;
    std::fs::write(path, bytes).map_err(|source| PictureError::Write { path: path.to_owned(), source })
}
