fn main() {
    let mut a = std::env::args().skip(1).map(|a| a.parse::<u64>().unwrap());
    let (n, first) = (a.next().unwrap_or(1000), a.next().unwrap_or(0));
    let t = std::time::Instant::now();
    if let Some(lines) = a.next() {
        let (s, tr, e) = pvlock_sim::fuzz::replay(first, lines as usize);
        println!("{s:#?} {tr:#?}");
        e.log.iter().for_each(|l| println!("{l}"));
        println!("{:?} {} ns", e.violation, e.ns);
        return;
    }
    let r = pvlock_sim::fuzz::fuzz(first..first + n, |_| true);
    println!("{} seeds, {} failures, {} ops, {} faults, {:.1} s simulated, {:.1?}", r.seeds, r.failures.len(), r.operations, r.faults, r.ns as f64 / 1e9, t.elapsed());
    r.failures.iter().take(10).for_each(|f| println!("{f:?}"));
}
