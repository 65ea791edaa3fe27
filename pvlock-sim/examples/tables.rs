//! scratch
use pvlock_sim::{params::Params, tables};
use rayon::prelude::*;
fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let params = Params::with(pvlock_sim::params::DEFAULT, &args[2..].to_vec()).unwrap();
    let seeds: u64 = args[1].parse().unwrap();
    let names: Vec<&str> = if args[0] == "all" { tables::ALL.to_vec() } else { args[0].split(',').collect() };
    let mut all = Vec::new();
    for name in names {
        let mut table = tables::table(name).unwrap();
        if let Ok(keep) = std::env::var("KEEP") {
            table.rows.retain(|r| r.origin == tables::Origin::Published || keep.split(';').any(|k| r.contender.name == k));
        }
        if let Ok(t) = std::env::var("TIMES") {
            let t: u64 = t.parse().unwrap();
            for c in &mut table.columns {
                c.times_ns = (t * 300_000, t * 1_000_000);
            }
        }
        let t = std::time::Instant::now();
        let scenarios = table.scenarios(seeds, params);
        let outcomes: Vec<_> = scenarios.par_iter().map(pvlock_sim::run).collect();
        let results = table.results(seeds, &outcomes).unwrap();
        println!("{}", table.text(&results));
        for (row, r) in table.rows.iter().enumerate() {
            for (column, _) in table.columns.iter().enumerate() {
                let o = outcomes[(row * table.columns.len() + column) * seeds as usize].as_ref().unwrap();
                let c = o.total();
                let s = o.spent();
                let tot = table.columns[column].cpus as f64 * o.measured_ns as f64 * 2.4;
                println!(
                    "  {:40} {} acq {:.2}M ple {} y {} d {}/{} parks {} sw {} irq {} spin {:.2} host {:.2} comp {:.2} p99 {}us forced {}",
                    r.contender.name,
                    column,
                    c.acquisitions as f64 / 1e6,
                    c.pause_loops,
                    c.yields,
                    c.directed,
                    c.directed_failed,
                    c.parks,
                    c.switches,
                    c.interrupts,
                    s.spinning as f64 / tot,
                    s.host as f64 / tot,
                    s.computing as f64 / tot,
                    c.wait_quantile(0.99) / 2400,
                    o.vms.iter().map(|v| v.host.forced).sum::<u64>()
                );
            }
        }
        if table.counts {
            all.extend(table.orderings(&results));
        }
        println!("{:.1} s", t.elapsed().as_secs_f64());
    }
    for o in &all {
        println!("{} {:16} {:30} > {:30} {}", o.table, o.column, o.better, o.worse, if o.holds { "yes" } else { "NO" });
    }
    println!("{}/{}", all.iter().filter(|o| o.holds).count(), all.len());
}
