//! Ends what was started: on Ctrl-C or another request to end, and at a step's time limit.
//!
//! A terminal sends Ctrl-C to everything below it, but `kill` and most CI systems tell this process alone.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, set_child_subreaper};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// How long processes have to end by themselves.
const GRACE: Duration = Duration::from_secs(2);

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// From now on a signal to end ends all descendants, and [`interrupted`] is true.
pub(crate) fn end_on_signals() -> Result<(), String> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).map_err(|error| format!("cannot handle signals: {error}"))?;
    // Descendants whose parent ended first become children of this process instead of getting out of sight.
    set_child_subreaper(Pid::from_raw(1)).map_err(|error| format!("cannot adopt descendants: {error}"))?;
    thread::spawn(move || {
        for _ in signals.forever() {
            INTERRUPTED.store(true, Ordering::Relaxed);
            end_all();
        }
    });
    Ok(())
}

/// Whether a signal asked this process to end.
pub(crate) fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Asks all descendants to end, again and again in case they start more; kills those that do not.
pub(crate) fn end_all() {
    let start = Instant::now();
    loop {
        let left = descendants();
        if left.is_empty() {
            return;
        }
        let signal = if start.elapsed() < GRACE { Signal::TERM } else { Signal::KILL };
        for pid in left {
            // It may have ended since; there is nobody to tell.
            let _ = kill_process(pid, signal);
        }
        thread::sleep(Duration::from_millis(50));
    }
}

/// Every process below this one that still runs.
fn descendants() -> Vec<Pid> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let stats = entries.flatten().filter_map(|entry| fs::read_to_string(entry.path().join("stat")).ok());
    below(std::process::id(), &stats.filter_map(|stat| parse(&stat)).collect::<Vec<_>>())
}

/// A process and its parent.
type Link = (u32, u32);

/// From a `/proc/PID/stat`; nothing if the process has ended and only waits to be noticed.
fn parse(stat: &str) -> Option<Link> {
    // The name in parentheses may hold anything.
    let (front, back) = stat.rsplit_once(')')?;
    let mut fields = back.split_whitespace();
    let state = fields.next()?;
    let parent = fields.next()?.parse().ok()?;
    (state != "Z" && state != "X").then_some((front.split_once(' ')?.0.parse().ok()?, parent))
}

fn below(root: u32, links: &[Link]) -> Vec<Pid> {
    let mut family = vec![root];
    let mut next = 0;
    while let Some(&parent) = family.get(next) {
        family.extend(links.iter().filter(|link| link.1 == parent).map(|link| link.0));
        next += 1;
    }
    family[1..].iter().filter_map(|&pid| Pid::from_raw(i32::try_from(pid).ok()?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_lines_are_read() {
        assert_eq!(parse("12 (a ) b) S 7 12 12 0 -1"), Some((12, 7)));
        assert_eq!(parse("12 (gone) Z 7 12 12 0 -1"), None);
        assert_eq!(parse(""), None);
    }

    #[test]
    fn a_family_is_found_whatever_the_order() {
        let links = [(4, 3), (3, 2), (2, 1), (9, 8), (5, 2), (2000, 4)];
        let found: Vec<_> = below(2, &links).into_iter().map(Pid::as_raw_pid).collect();
        assert_eq!(found, [3, 5, 4, 2000]);
        assert!(below(77, &links).is_empty());
    }

    #[test]
    fn this_process_sees_its_own_child() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("sleep");
        let seen = descendants().iter().any(|pid| pid.as_raw_pid().cast_unsigned() == child.id());
        child.kill().and_then(|()| child.wait()).expect("ended");
        assert!(seen);
    }
}
