//! From what a run left behind to the numbers of a row.

use crate::backend::{Outcome, Spec};
use crate::order::Order;
use crate::vm::ExitCounts;
use hdrhistogram::Histogram;
use pvlock_guest_image::job::{WAIT_BUCKETS, Workload, wait_of_bucket};
use pvlock_host::Statistics;
use serde::Serialize;
use std::sync::atomic::Ordering;

/// Waits for the lock in µs, from the request to the acquisition.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct WaitUs {
    /// Median.
    pub p50: f64,
    /// 99.9 %.
    pub p999: f64,
    /// Longest.
    pub max: f64,
}

/// Waits of about one length.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct WaitBucket {
    /// None is shorter, in µs.
    pub from_us: f64,
    /// All are shorter, in µs.
    pub to_us: f64,
    /// How many.
    pub count: u64,
}

/// One row of the table: a lock at one number of vCPUs.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The lock's name.
    pub lock: &'static str,
    /// vCPUs.
    pub vcpus: usize,
    /// vCPUs per CPU.
    pub overcommit: f64,
    /// Iterations of work inside the lock.
    pub inside: u64,
    /// Iterations of work outside.
    pub outside: u64,
    /// Acquisitions per second; the median of the repeats.
    pub ops_per_s: f64,
    /// Share of the bound: the best lock at one vCPU per CPU in this run. Absent if there was no such row.
    pub share_of_bound: Option<f64>,
    /// Jain's fairness index of the vCPUs' acquisitions: 1 if all had as many, 1/n if one had all.
    pub jain: f64,
    /// Waits.
    pub wait_us: WaitUs,
    /// PAUSEs per acquisition; absent for a lock that does not count them.
    pub pauses_per_op: Option<f64>,
    /// HALT doorbells; with PV_UNHALT, halts as the guest counts them.
    pub halts: u64,
    /// KICK doorbells; with PV_UNHALT, kicks as the guest counts them.
    pub kicks: u64,
    /// Sleeps that ended for no known reason.
    pub spurious: u64,
    /// Sleeps that only the deadline ended.
    pub forced: u64,
    /// CPU seconds used.
    pub cpu_s: f64,
    /// Share of all CPUs that was idle.
    pub cpu_idle: f64,
    /// Whether no critical section was lost or counted twice.
    pub exact: bool,
    /// Acquisitions per second of each repeat, in the order they ran.
    pub repeats: Vec<f64>,
    /// The distribution of waits in all repeats, by rising length. Only a sweep keeps it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub waits: Vec<WaitBucket>,
    /// What the order log says, in a checking run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub order: Option<OrderSummary>,
}

/// The order log's verdict.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct OrderSummary {
    /// Acquisitions checked.
    pub checked: u64,
    /// Acquisitions that came before somebody who had certainly drawn earlier.
    pub overtaken: u64,
    /// Tickets that did not follow the one before.
    pub out_of_sequence: u64,
    /// Acquisitions that did not fit into the log.
    pub unlogged: u64,
}

impl OrderSummary {
    /// Whether there was something to check, and nobody was overtaken.
    pub fn is_strict(&self) -> bool {
        self.checked > 0 && self.overtaken == 0 && self.out_of_sequence == 0
    }
}

/// One run, measured.
#[derive(Clone, Debug)]
pub struct Measured {
    /// The row it would make alone.
    pub row: Row,
    /// What the host counted.
    pub host: Statistics,
    /// Exits by kind.
    pub exits: Option<ExitCounts>,
    /// The full verdict on the order.
    pub order: Option<Order>,
}

/// Measures a run of `spec` on a machine with `pcpus` CPUs.
pub fn measure(spec: &Spec, outcome: &Outcome<'_>, pcpus: usize) -> Measured {
    let job = outcome.job;
    let per_vcpu =
        |f: fn(&pvlock_guest_image::job::Done) -> u64| job.done.iter().take(spec.vcpus).map(|done| f(done)).collect::<Vec<_>>();
    let measured = per_vcpu(|done| done.measured.load(Ordering::Relaxed));
    let acquisitions = sum(&per_vcpu(|done| done.acquisitions.load(Ordering::Relaxed)));
    let counters: Vec<u64> = job.protected.iter().map(|protected| protected.counter.load(Ordering::Relaxed)).collect();
    let advanced = sum(&counters);
    let exact = match spec.workload {
        // The second counter was advanced only by the vCPU whose turn it was, which counted it too.
        Workload::PingPong => {
            let counter = |lock: usize| job.protected[lock].counter.load(Ordering::Relaxed);
            let turns = sum(&per_vcpu(|done| done.turns.load(Ordering::Relaxed)));
            counter(0) == acquisitions && counter(1) == turns
        }
        _ => advanced == acquisitions,
    };

    let tick_ns = outcome.times.elapsed.as_nanos() as f64 / (outcome.times.ticks.max(1)) as f64;
    // Three significant digits over any 64-bit value; recording cannot fail then.
    let mut waits = Histogram::<u64>::new(3).ok();
    let mut longest = 0;
    let mut counts = vec![0; WAIT_BUCKETS];
    for done in job.done.iter().take(spec.vcpus) {
        longest = longest.max(done.longest_wait.load(Ordering::Relaxed));
        for (sum, count) in counts.iter_mut().zip(&done.waits) {
            *sum += count.load(Ordering::Relaxed);
        }
    }
    let bound_us = |bucket: usize| match bucket {
        WAIT_BUCKETS.. => u64::MAX as f64 * tick_ns / 1000.0,
        bucket => wait_of_bucket(bucket) as f64 * tick_ns / 1000.0,
    };
    let buckets: Vec<WaitBucket> = (0..)
        .zip(counts)
        .filter(|(_, count)| *count > 0)
        .map(|(bucket, count)| WaitBucket { from_us: bound_us(bucket), to_us: bound_us(bucket + 1), count })
        .collect();
    if let Some(waits) = &mut waits {
        for bucket in &buckets {
            let _ = waits.record_n(((bucket.from_us * 1000.0) as u64).max(1), bucket.count);
        }
    }
    let quantile = |q: f64| waits.as_ref().map_or(f64::NAN, |waits| waits.value_at_quantile(q) as f64 / 1000.0);

    let seconds = outcome.times.elapsed.as_secs_f64();
    let acquired = sum(&measured);
    let pauses = sum(&per_vcpu(|done| done.pauses.load(Ordering::Relaxed)));
    let ops_per_s = if seconds > 0.0 { acquired as f64 / seconds } else { 0.0 };
    let order = (spec.log > 0).then(|| outcome.log.order(job));
    let row = Row {
        lock: spec.lock.name(),
        vcpus: spec.vcpus,
        overcommit: spec.vcpus as f64 / pcpus as f64,
        inside: spec.inside,
        outside: spec.outside,
        ops_per_s,
        share_of_bound: None,
        jain: jain(&measured),
        wait_us: WaitUs { p50: quantile(0.5), p999: quantile(0.999), max: longest as f64 * tick_ns / 1000.0 },
        pauses_per_op: (spec.lock.counts_pauses() && acquired > 0).then(|| pauses as f64 / acquired as f64),
        halts: outcome.host.halts.saturating_add(sum(&per_vcpu(|done| done.halts.load(Ordering::Relaxed)))),
        kicks: outcome.host.kicks.saturating_add(sum(&per_vcpu(|done| done.kicks.load(Ordering::Relaxed)))),
        spurious: outcome.host.spurious,
        forced: outcome.host.forced,
        cpu_s: outcome.times.cpu.as_secs_f64(),
        cpu_idle: outcome.times.idle,
        exact: exact && acquisitions > 0,
        repeats: vec![ops_per_s],
        waits: buckets,
        order: order.map(|order| OrderSummary {
            checked: order.checked,
            overtaken: order.overtaken + order.backwards,
            out_of_sequence: order.out_of_sequence,
            unlogged: order.unlogged,
        }),
    };
    Measured { row, host: outcome.host, exits: outcome.exits, order }
}

/// A sum of what a guest has written: it may be anything.
fn sum(words: &[u64]) -> u64 {
    words.iter().fold(0, |sum, &word| sum.saturating_add(word))
}

/// Jain's index: (Σx)² / (n Σx²).
pub fn jain(shares: &[u64]) -> f64 {
    let sum: f64 = shares.iter().map(|&x| x as f64).sum();
    let squares: f64 = shares.iter().map(|&x| (x as f64).powi(2)).sum();
    if squares == 0.0 { 1.0 } else { sum * sum / (shares.len() as f64 * squares) }
}

/// One row from the repeats of a cell: that of the median throughput, with everything that must never happen summed up.
pub fn median(mut repeats: Vec<Row>) -> Option<Row> {
    let all: Vec<f64> = repeats.iter().map(|row| row.ops_per_s).collect();
    let exact = repeats.iter().all(|row| row.exact);
    let forced = repeats.iter().map(|row| row.forced).sum();
    let mut waits: Vec<WaitBucket> = repeats.iter().flat_map(|row| row.waits.iter().copied()).collect();
    waits.sort_by(|a, b| a.from_us.total_cmp(&b.from_us));
    // The same bucket of several repeats, whose ticks were measured a little differently.
    waits.dedup_by(|next, kept| {
        let same = next.from_us < (kept.from_us + kept.to_us) / 2.0;
        kept.count += if same { next.count } else { 0 };
        same
    });
    let orders: Vec<OrderSummary> = repeats.iter().filter_map(|row| row.order).collect();
    repeats.sort_by(|a, b| a.ops_per_s.total_cmp(&b.ops_per_s));
    let middle = repeats.len() / 2;
    let mut row = repeats.into_iter().nth(middle)?;
    row.exact = exact;
    row.forced = forced;
    row.repeats = all;
    row.waits = waits;
    row.order = row.order.map(|_| OrderSummary {
        checked: orders.iter().map(|order| order.checked).sum(),
        overtaken: orders.iter().map(|order| order.overtaken).sum(),
        out_of_sequence: orders.iter().map(|order| order.out_of_sequence).sum(),
        unlogged: orders.iter().map(|order| order.unlogged).fold(0, u64::saturating_add),
    });
    Some(row)
}

/// Fills in each row's share of the bound: the best throughput of any lock at one vCPU per CPU on the same sections.
pub fn share_of_bound(rows: &mut [Row]) {
    let at_one: Vec<_> =
        rows.iter().filter(|row| row.overcommit == 1.0).map(|row| (row.inside, row.outside, row.ops_per_s)).collect();
    for row in rows {
        let same = at_one.iter().filter(|(inside, outside, _)| (*inside, *outside) == (row.inside, row.outside));
        let bound = same.map(|(.., ops_per_s)| *ops_per_s).fold(0.0, f64::max);
        row.share_of_bound = (bound > 0.0).then(|| row.ops_per_s / bound);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jain_is_one_for_equals_and_a_share_for_a_monopolist() {
        assert_eq!(jain(&[5, 5, 5, 5]), 1.0);
        assert_eq!(jain(&[9, 0, 0]), 1.0 / 3.0);
        assert_eq!(jain(&[0, 0]), 1.0);
    }

    fn row(ops_per_s: f64, exact: bool, forced: u64) -> Row {
        Row {
            lock: "ticket",
            vcpus: 2,
            overcommit: 1.0,
            inside: 200,
            outside: 2000,
            ops_per_s,
            share_of_bound: None,
            jain: 1.0,
            wait_us: WaitUs { p50: 0.0, p999: 0.0, max: 0.0 },
            pauses_per_op: None,
            halts: 0,
            kicks: 0,
            spurious: 0,
            forced,
            cpu_s: 0.0,
            cpu_idle: 0.0,
            exact,
            repeats: vec![ops_per_s],
            waits: vec![WaitBucket { from_us: 1.0 + ops_per_s / 1000.0, to_us: 2.0, count: 1 }],
            order: None,
        }
    }

    #[test]
    fn the_median_row_hides_no_inexact_repeat_and_no_forced_wake() {
        let row = median(vec![row(3.0, true, 1), row(1.0, false, 0), row(2.0, true, 2)]).unwrap();
        assert_eq!((row.ops_per_s, row.exact, row.forced, row.repeats.as_slice()), (2.0, false, 3, [3.0, 1.0, 2.0].as_slice()));
        assert_eq!(row.waits, [WaitBucket { from_us: 1.001, to_us: 2.0, count: 3 }], "of all repeats");
        assert!(median(Vec::new()).is_none());
    }

    #[test]
    fn the_bound_is_the_best_at_one_vcpu_per_cpu() {
        let mut rows = [row(10.0, true, 0), row(20.0, true, 0), row(99.0, true, 0)];
        rows[2].overcommit = 2.0;
        share_of_bound(&mut rows);
        assert_eq!(rows.map(|row| row.share_of_bound.unwrap()), [0.5, 1.0, 4.95]);
        let mut alone = [row(10.0, true, 0)];
        alone[0].overcommit = 4.0;
        share_of_bound(&mut alone);
        assert_eq!(alone[0].share_of_bound, None);
        let mut lengths = [row(10.0, true, 0), row(4.0, true, 0), row(2.0, true, 0)];
        (lengths[1].inside, lengths[2].inside, lengths[2].overcommit) = (40_000, 40_000, 2.0);
        share_of_bound(&mut lengths);
        assert_eq!(lengths.map(|row| row.share_of_bound.unwrap()), [1.0, 1.0, 0.5], "each length has its own");
    }
}
