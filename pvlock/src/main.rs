//! The `pvlock` command.

use clap::{Parser, Subcommand};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use pvlock::sim::{self, fuzz::Shown};
use pvlock::{plot, report, run};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

/// Paravirtual spinlocks on a real VM.
#[derive(Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    run: run::Options,
}

#[derive(Subcommand)]
enum Command {
    /// Compare locks in a VM with more vCPUs than CPUs (the default)
    Run(run::Options),
    /// Say what this machine offers, and what follows for back-end and policy
    Doctor,
    /// Locks on a simulated host
    Sim(sim::Arguments),
}

/// Set by Ctrl-C.
static INTERRUPT: AtomicBool = AtomicBool::new(false);
/// What shells use for a process that SIGINT ended.
const EXIT_INTERRUPTED: u8 = 130;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let handler = || {
        if INTERRUPT.swap(true, Ordering::Relaxed) {
            // Asked twice: do not wait for anything.
            std::process::exit(EXIT_INTERRUPTED.into());
        }
    };
    if let Err(error) = ctrlc::set_handler(handler) {
        eprintln!("pvlock: Ctrl-C will end the program at once, without a table: {error}");
    }
    match arguments.command {
        None => run(&arguments.run),
        Some(Command::Run(options)) => run(&options),
        Some(Command::Doctor) => {
            pvlock::doctor::examine().iter().for_each(|finding| println!("{finding}"));
            ExitCode::SUCCESS
        }
        Some(Command::Sim(sim::Arguments { command: sim::Command::Fuzz(options) })) => fuzz(&options),
    }
}

fn fuzz(options: &sim::fuzz::Options) -> ExitCode {
    let bar = bar(options.seeds());
    bar.set_message("seeds");
    let shown = options.run(&INTERRUPT, |done| bar.set_position(done));
    bar.finish_and_clear();
    match shown {
        Ok(Shown::Held) => ExitCode::SUCCESS,
        Ok(Shown::Failed) => ExitCode::FAILURE,
        Ok(Shown::Interrupted) => ExitCode::from(EXIT_INTERRUPTED),
        Err(error) => {
            eprintln!("pvlock: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &run::Options) -> ExitCode {
    let plan = match options.plan() {
        Ok(plan) => plan,
        Err(error) => {
            eprintln!("pvlock: {error}");
            return ExitCode::FAILURE;
        }
    };
    if !options.json {
        println!("{}", report::heading(&plan));
    }
    let bar = progress_bar(&plan);
    let run_ms = plan.limits.run.as_millis() as u64;
    let (report, error) = plan.carry_out(&INTERRUPT, |at| {
        bar.set_message(format!("{} on {} vCPUs", at.cell.lock.name(), at.cell.vcpus));
        bar.set_position(u64::from(at.runs) * run_ms + at.time.as_millis() as u64);
    });
    bar.finish_and_clear();
    if !options.json && !report.rows.is_empty() {
        println!("{}\n{}", report::tables(&plan, &report), report::summary(&plan, &report));
    }
    let drawn = match &plan.sweep {
        Some(sweep) if !report.rows.is_empty() => plot::draw(&options.plot, &plan, sweep, &report),
        _ => Ok(Vec::new()),
    };
    let pictures = drawn.as_deref().unwrap_or_default();
    if options.json {
        println!("{}", report::json(&plan, &report, pictures));
    } else if !pictures.is_empty() {
        let names: Vec<_> = pictures.iter().map(|path| path.display().to_string()).collect();
        println!("pictures: {}", names.join(", "));
    }
    if let Err(error) = &drawn {
        eprintln!("pvlock: {error}");
    }
    if let Some(error) = error {
        eprintln!("pvlock: {error}");
        return ExitCode::FAILURE;
    }
    if drawn.is_err() {
        return ExitCode::FAILURE;
    }
    if report.interrupted {
        return ExitCode::from(EXIT_INTERRUPTED);
    }
    let wrong =
        report.rows.iter().filter(|row| !row.exact || row.forced > 0 || row.order.is_some_and(|order| !order.is_strict())).count();
    if wrong > 0 {
        eprintln!("pvlock: {wrong} rows show a lock that does not work: see the columns exact, forced and order");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

fn progress_bar(plan: &run::Plan) -> ProgressBar {
    bar(u64::from(plan.runs()) * plan.limits.run.as_millis() as u64)
}

fn bar(length: u64) -> ProgressBar {
    // Draws nothing when standard error is no terminal.
    let bar = ProgressBar::with_draw_target(Some(length), ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template("{bar:40} {percent:>3} % {msg} (about {eta} left)") {
        bar.set_style(style);
    }
    bar
}
