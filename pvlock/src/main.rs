//! The `pvlock` command.

use clap::{Parser, Subcommand};
use pvlock::{plot, progress, report, run, sim};
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
    /// Compare locks on a simulated host (deterministic, of any size)
    // Boxed: the options are many.
    Sim(Box<sim::Arguments>),
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
        Some(Command::Sim(arguments)) => match sim::main(&arguments, &INTERRUPT) {
            Ok(sim::Ended::Done) => ExitCode::SUCCESS,
            Ok(sim::Ended::Interrupted) => ExitCode::from(EXIT_INTERRUPTED),
            Err(error) => {
                eprintln!("pvlock: {error}");
                ExitCode::FAILURE
            }
        },
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
    let run_ms = plan.limits.run.as_millis() as u64;
    let bar = progress::bar(u64::from(plan.runs()) * run_ms);
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
    if let (Some(path), Some(trace)) = (&options.trace, &report.trace)
        && let Err(error) = std::fs::write(path, trace.to_json())
    {
        eprintln!("pvlock: cannot write {}: {error}", path.display());
        return ExitCode::FAILURE;
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
