//! How far a long command has come.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar with an estimate of the time left. Draws nothing when standard error is no terminal.
pub fn bar(length: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(length), ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template("{bar:40} {percent:>3} % {msg} (about {eta} left)") {
        bar.set_style(style);
    }
    bar
}
