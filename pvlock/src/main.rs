//! The `pvlock` command.

use clap::{Parser, Subcommand};
use pvlock::{hostile, plot, progress, report, run, sim, soak};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

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
    /// Run random mixes of everything, disturb them, and see that nothing is lost
    Soak(soak::Options),
    /// Run ordinary work beside guests that break the rules, and see what it gets of the CPUs
    Hostile(hostile::Options),
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
    // Rust ignores SIGPIPE, and a `pvlock … | head` would end in a panic.
    // SAFETY: the default action runs no code of ours, and no other thread has started.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
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
        Some(Command::Soak(options)) => soak(&options),
        Some(Command::Hostile(options)) => hostile(&options),
        Some(Command::Doctor) => {
            pvlock::doctor::examine().iter().for_each(|finding| println!("{finding}"));
            ExitCode::SUCCESS
        }
        Some(Command::Sim(arguments)) => match sim::main(&arguments, &INTERRUPT) {
            Ok(sim::Ended::Done) => ExitCode::SUCCESS,
            Ok(sim::Ended::Failed) => ExitCode::FAILURE,
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

/// How often a soak says where it stands if nobody sees its bar.
const WORD: Duration = Duration::from_secs(30);

fn soak(options: &soak::Options) -> ExitCode {
    let length = (60.0 * options.minutes) as u64;
    let bar = progress::with_template(length, "{bar:40} {percent:>3} % {msg}");
    let seed = options.seed();
    println!("pvlock soak: {} minutes from seed {seed}", options.minutes);
    let mut last_word = Instant::now();
    let (summary, result) = soak::soak(options, seed, &INTERRUPT, |summary| {
        let at = summary.time.as_secs();
        let left = length.saturating_sub(at);
        let (runs, machines) = (summary.on_kvm + summary.on_threads, summary.machines);
        let word = format!("{}:{:02} left: {runs} runs, {machines} machines, {} forced", left / 60, left % 60, summary.host.forced);
        if bar.is_hidden() && last_word.elapsed() >= WORD {
            last_word = Instant::now();
            println!("{word}");
        }
        bar.set_position(at.min(length));
        bar.set_message(word);
    });
    bar.finish_and_clear();
    println!("{summary}");
    match result {
        Err(failure) => {
            eprintln!("pvlock: {failure}");
            ExitCode::FAILURE
        }
        Ok(()) if INTERRUPT.load(Ordering::Relaxed) => ExitCode::from(EXIT_INTERRUPTED),
        Ok(()) => ExitCode::SUCCESS,
    }
}

fn hostile(options: &hostile::Options) -> ExitCode {
    let bar = progress::bar(options.runs());
    let (report, result) = hostile::attack(options, &INTERRUPT, |runs, name| {
        bar.set_position(runs);
        bar.set_message(name.to_owned());
    });
    bar.finish_and_clear();
    println!("{}", report.table());
    println!("share: throughput against that beside a VM that only spins; least and most of the runs, medians otherwise;");
    println!("pause, save, end: until both VMs were paused, then copied; and until both had ended; forced: the neighbour's");
    match result {
        Ok(()) if report.is_sound() => ExitCode::SUCCESS,
        Ok(()) => {
            eprintln!("pvlock: a guest has disturbed its neighbour: see the columns forced and exact");
            ExitCode::FAILURE
        }
        Err(hostile::Failure::Interrupted) => ExitCode::from(EXIT_INTERRUPTED),
        Err(failure) => {
            eprintln!("pvlock: {failure}");
            ExitCode::FAILURE
        }
    }
}
