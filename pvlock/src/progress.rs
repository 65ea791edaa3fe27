//! How far a long command has come.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar with an estimate of the time left.
pub fn bar(length: u64) -> ProgressBar {
    with_template(length, "{bar:40} {percent:>3} % {msg} (about {eta} left)")
}

/// A bar. Draws nothing when standard error is no terminal.
pub fn with_template(length: u64, template: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(length), ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}
