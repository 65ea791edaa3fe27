//! What this process has: file descriptors, threads, memory. Runs come and go, and leave nothing behind.

use std::collections::VecDeque;
use std::fmt;
use std::fs;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// What is gone by then has not leaked: threads that were joined are in `/proc` for a moment, and a VM that is dropped leaves its
/// threads behind if they get no CPU for 2 s.
const SETTLE: Duration = Duration::from_secs(60);
/// Runs whose memory is looked at together: what the most of the first and the least of the last used is not by chance.
const WINDOW: usize = 20;
/// So much more memory is a leak: less than the RAM of one guest, more than the allocator's own.
const LEAK_KIB: u64 = 8 << 10;

#[derive(Clone, Copy, PartialEq, Eq)]
struct Count {
    files: usize,
    threads: usize,
}

impl Count {
    fn now() -> io::Result<Self> {
        let entries = |path| fs::read_dir(path).map(Iterator::count);
        Ok(Self { files: entries("/proc/self/fd")?, threads: entries("/proc/self/task")? })
    }
}

/// Since the beginning.
#[derive(Clone, Copy, Debug, Default)]
pub struct Growth {
    /// File descriptors.
    pub files: i64,
    /// Threads.
    pub threads: i64,
    /// Resident memory in KiB: the least of the last runs against the most of the first; `None` with too few runs.
    pub memory_kib: Option<i64>,
    /// Resident memory now, in KiB.
    pub resident_kib: u64,
}

impl Growth {
    /// What of it must not be.
    pub(super) fn fault(&self) -> Option<String> {
        let leaks = self.files > 0 || self.threads > 0 || self.memory_kib.is_some_and(|kib| kib > LEAK_KIB as i64);
        leaks.then(|| format!("something leaks: {self}"))
    }
}

impl fmt::Display for Growth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { files, threads, memory_kib, resident_kib } = self;
        write!(f, "growth: {files} file descriptors, {threads} threads, ")?;
        match memory_kib {
            Some(kib) => write!(f, "{kib} KiB of memory ({resident_kib} KiB resident)"),
            None => write!(f, "too few runs to say of memory"),
        }
    }
}

/// The count at the beginning, and the memory after the first and the last runs.
pub(super) struct Census {
    first: Count,
    most_at_first: u64,
    first_runs: usize,
    last: VecDeque<u64>,
}

impl Census {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { first: Count::now()?, most_at_first: 0, first_runs: 0, last: VecDeque::new() })
    }

    /// Looks again, between two runs. Waits for what may still go away, unless interrupted.
    pub(super) fn take(&mut self, interrupt: &AtomicBool) -> io::Result<Growth> {
        let asked = Instant::now();
        let waits = || asked.elapsed() < SETTLE && !interrupt.load(Ordering::Relaxed);
        let mut count = Count::now()?;
        while (count.files > self.first.files || count.threads > self.first.threads) && waits() {
            thread::sleep(Duration::from_millis(1));
            count = Count::now()?;
        }
        let resident_kib = resident_kib()?;
        if self.first_runs < WINDOW {
            self.first_runs += 1;
            self.most_at_first = self.most_at_first.max(resident_kib);
        } else {
            self.last.push_back(resident_kib);
            if self.last.len() > WINDOW {
                self.last.pop_front();
            }
        }
        let least = self.last.iter().min().filter(|_| self.last.len() == WINDOW);
        let grown = |before: usize, now: usize| now as i64 - before as i64;
        Ok(Growth {
            files: grown(self.first.files, count.files),
            threads: grown(self.first.threads, count.threads),
            memory_kib: least.map(|&least| least as i64 - self.most_at_first as i64),
            resident_kib,
        })
    }
}

fn resident_kib() -> io::Result<u64> {
    // SAFETY: gives memory that nobody uses back to the kernel; the allocator may do so at any time.
    unsafe { libc::malloc_trim(0) };
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok())
        .ok_or_else(|| io::Error::other("no VmRSS in /proc/self/status"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test: files of the one would be counted by the other.
    #[test]
    fn a_file_that_stays_open_is_seen_and_what_goes_away_late_has_not_leaked() {
        let mut census = Census::new().expect("/proc");
        let files: Vec<_> = (0..50).map(|_| fs::File::open("/proc/self/status").expect("a file")).collect();
        // Other tests of this process open and close theirs meanwhile.
        assert!(census.take(&AtomicBool::new(true)).expect("/proc").fault().is_some());
        let late = thread::spawn(move || {
            // Longer than a dropped VM waits for its threads.
            thread::sleep(Duration::from_secs(3));
            drop(files);
        });
        assert!(census.take(&AtomicBool::new(false)).expect("/proc").fault().is_none());
        late.join().expect("no panic");
    }

    #[test]
    fn memory_grows_only_if_all_of_the_last_runs_have_more_than_any_of_the_first() {
        let growth = |kib| Growth { memory_kib: Some(kib), ..Growth::default() };
        assert!(growth(LEAK_KIB as i64).fault().is_none());
        assert!(growth(LEAK_KIB as i64 + 1).fault().is_some());
        assert!(Growth::default().fault().is_none());
    }
}
