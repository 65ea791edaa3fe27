//! The published orderings that short runs of the tables show, as a snapshot that may only get better.

use pvlock_sim::parallel::run_all;
use pvlock_sim::params::Params;
use pvlock_sim::tables::{self, report};
use std::collections::BTreeSet;
use std::sync::atomic::AtomicBool;

/// One seed, a fourth of the time.
const SEEDS: u64 = 1;
const FRACTION: u64 = 4;

#[test]
fn no_published_ordering_is_lost() {
    let go_on = AtomicBool::new(false);
    let mut orderings = Vec::new();
    for table in tables::ALL.into_iter().filter_map(tables::table).filter(|table| table.counts) {
        let table = table.brief(FRACTION);
        let outcomes = run_all(&table.scenarios(SEEDS, Params::default()), 2, &go_on, |_| ()).expect("all can be simulated");
        orderings.extend(table.orderings(&table.results(SEEDS, &outcomes).expect("nobody interrupts")));
    }
    let line = |ordering: &report::Ordering| {
        let report::Ordering { table, column, better, worse, .. } = ordering;
        format!("{table}, {column}: {better} > {worse}")
    };
    let held: BTreeSet<String> = orderings.iter().filter(|ordering| ordering.holds).map(line).collect();
    let before: BTreeSet<String> = include_str!("orderings.txt").lines().map(str::to_owned).collect();
    let lost: Vec<_> = before.difference(&held).collect();
    assert!(lost.is_empty(), "no longer: {lost:#?}");
    let won: Vec<_> = held.difference(&before).collect();
    assert!(won.is_empty(), "better than the snapshot: add to pvlock-sim/tests/orderings.txt: {won:#?}");
    assert!(before.len() * 100 >= orderings.len() * 80, "a snapshot of most of the {} orderings", orderings.len());
}
