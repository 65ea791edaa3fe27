//! `pvlock sim`: locks on a simulated host.

pub mod fuzz;
mod options;
mod report;
mod sweep;
mod table;

use crate::progress;
use clap::{Args, Subcommand};
pub use options::Options;
use options::OptionsError;
use pvlock_sim::picture::map::Map;
use pvlock_sim::picture::{self, Format, PictureError};
use pvlock_sim::scenario::ScenarioError;
use pvlock_sim::schedule::{Schedule, ScheduleError};
use pvlock_sim::trace::Trace;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// Arguments of `pvlock sim`.
#[derive(Clone, Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    options: Options,
}

#[derive(Clone, Debug, Subcommand)]
enum Command {
    /// Simulate a published table, and print both
    Table(table::Options),
    /// Let things go wrong, by seed, and look whether everything holds that has to
    Fuzz(fuzz::Options),
    /// Draw the schedule map of a file with one span or mark a line, as --map FILE.jsonl writes it
    Map(MapOptions),
}

#[derive(Clone, Debug, Args)]
struct MapOptions {
    /// Spans and marks, one JSON object a line
    schedule: PathBuf,
    /// The picture: .png or .svg
    picture: PathBuf,
    /// From which ms of the file on [default: the first]
    #[arg(long, value_name = "MS", value_parser = options::not_negative)]
    from_ms: Option<f64>,
    /// How many ms [default: to the last, at most 3]
    #[arg(long, value_name = "MS", value_parser = options::positive)]
    ms: Option<f64>,
    /// Above the picture
    #[arg(long, value_name = "TEXT", default_value = "Who ran where")]
    title: String,
}

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
pub enum SimError {
    /// What was asked for cannot be.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// What was asked for cannot be simulated.
    #[error(transparent)]
    Scenario(#[from] ScenarioError),
    /// No picture.
    #[error(transparent)]
    Picture(#[from] PictureError),
    /// A file that cannot be read.
    #[error("cannot read {path}: {source}", path = path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file that cannot be written.
    #[error("cannot write {path}: {source}", path = path.display())]
    Write {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file whose content is wrong.
    #[error("{path}: {source}", path = path.display())]
    Schedule {
        /// Which.
        path: PathBuf,
        /// What is wrong.
        source: ScheduleError,
    },
    /// Nothing to draw.
    #[error("{path}: there is nothing in the {ms} ms from {from_ms} ms on; choose another time with {how}", path = path.display())]
    Empty {
        /// What would show it.
        path: PathBuf,
        /// From when on.
        from_ms: f64,
        /// For how long.
        ms: f64,
        /// The options that choose.
        how: &'static str,
    },
}

/// Whether everything was done, or the user stopped it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// All of it.
    Done,
    /// What was finished has been printed.
    Interrupted,
    /// All of it, and something that has to hold did not.
    Failed,
}

/// Does what the arguments say, and prints.
///
/// # Errors
///
/// See [`SimError`].
pub fn main(arguments: &Arguments, interrupt: &AtomicBool) -> Result<Ended, SimError> {
    match &arguments.command {
        Some(Command::Map(options)) => map(options).map(|()| Ended::Done),
        Some(Command::Table(options)) => table::print(options, interrupt),
        Some(Command::Fuzz(options)) => fuzz::run(options, interrupt),
        None => compare(&arguments.options, interrupt),
    }
}

/// The sweep.
fn compare(options: &Options, interrupt: &AtomicBool) -> Result<Ended, SimError> {
    // What can be refused is refused before anything runs.
    let files = Files::new(options)?;
    let sweep = options.sweep()?;
    if !options.json {
        println!("{}", report::heading(&sweep));
    }
    let bar = progress::bar(sweep.scenarios.len() as u64);
    bar.set_message(format!("{} runs", sweep.scenarios.len()));
    bar.tick();
    let outcomes =
        pvlock_sim::parallel::run_all(&sweep.scenarios, options.machine.threads(), interrupt, |over| bar.set_position(over as u64));
    bar.finish_and_clear();
    let report = sweep.read(outcomes?);
    let written = if report.rows.is_empty() { Ok(Vec::new()) } else { files.write(&sweep, &report) };
    // The table is not lost if a picture is.
    let names = written.as_deref().unwrap_or_default();
    if options.json {
        println!("{}", report::json(&sweep, &report, names));
    } else {
        if !report.rows.is_empty() {
            println!("{}\n{}", report::table(&sweep, &report), report::LEGEND);
        }
        if report.interrupted {
            println!("Interrupted: {} of {} rows were finished.", report.rows.len(), sweep.cells.len());
        }
        names.iter().for_each(|name| println!("wrote {}", name.display()));
    }
    written?;
    Ok(if report.interrupted { Ended::Interrupted } else { Ended::Done })
}

/// What to write where.
struct Files<'a> {
    plot: &'a Path,
    map: Option<&'a Path>,
    trace: Option<&'a Path>,
}

impl<'a> Files<'a> {
    fn new(options: &'a Options) -> Result<Self, SimError> {
        Format::of(&options.plot)?;
        if let Some(map) = options.map.as_deref()
            && !is_lines(map)
        {
            Format::of(map).map_err(|_| OptionsError::MapEnding { path: map.to_owned() })?;
        }
        Ok(Self { plot: &options.plot, map: options.map.as_deref(), trace: options.trace.as_deref() })
    }

    fn write(&self, sweep: &sweep::Sweep, report: &sweep::Report) -> Result<Vec<PathBuf>, SimError> {
        picture::save(self.plot, &report::chart(sweep, report))?;
        let mut written = vec![self.plot.to_owned()];
        let Some(recorded) = &report.recorded else { return Ok(written) };
        if let Some(path) = self.map {
            let Map { schedule, from, to, .. } = recorded;
            if schedule.spans.is_empty() {
                let ms = |ns: u64| ns as f64 / 1e6;
                return Err(SimError::Empty { path: path.into(), from_ms: ms(*from), ms: ms(to - from), how: "--map-from-ms" });
            }
            if is_lines(path) {
                write(path, &schedule.write())?
            } else {
                picture::save(path, recorded)?
            }
            written.push(path.to_owned());
        }
        if let Some(path) = self.trace {
            write(path, &Trace::of(&recorded.schedule).to_json())?;
            written.push(path.to_owned());
        }
        Ok(written)
    }
}

fn is_lines(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == "jsonl")
}

fn write(path: &Path, text: &str) -> Result<(), SimError> {
    std::fs::write(path, text).map_err(|source| SimError::Write { path: path.to_owned(), source })
}

/// `pvlock sim map`.
fn map(options: &MapOptions) -> Result<(), SimError> {
    Format::of(&options.picture)?;
    let path = &options.schedule;
    let text = std::fs::read_to_string(path).map_err(|source| SimError::Read { path: path.clone(), source })?;
    let schedule = Schedule::read(&text).map_err(|source| SimError::Schedule { path: path.clone(), source })?;
    let (first, last) = schedule.extent().unwrap_or_default();
    let from = options.from_ms.map_or(first, options::ns_of_ms);
    let longest = options.ms.map_or((last.saturating_sub(from)).min(3_000_000), options::ns_of_ms);
    let to = from + longest;
    if !schedule.spans.iter().any(|span| span.start < to && span.end > from) {
        let ms = |ns: u64| ns as f64 / 1e6;
        return Err(SimError::Empty { path: path.clone(), from_ms: ms(from), ms: ms(longest), how: "--from-ms and --ms" });
    }
    let subtitle = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let cpus = schedule.cpus();
    picture::save(&options.picture, &Map { title: options.title.clone(), subtitle, schedule, cpus, from, to })?;
    println!("wrote {}", options.picture.display());
    Ok(())
}
