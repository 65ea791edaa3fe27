//! Pictures of a sweep, each as SVG and PNG.

use crate::measure::{Row, WaitBucket};
use crate::report;
use crate::run::{Plan, Report};
use crate::sweep::{Sections, Sweep};
use pvlock_sim::picture::chart::{Axis, Chart, Line, Panel, power_of_ten};
use pvlock_sim::picture::{self, Look, PictureError};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Size of a picture.
const SIZE: (u32, u32) = (1280, 600);

/// Draws both pictures of a sweep and returns the files written.
///
/// # Errors
///
/// See [`PictureError`]. Files before the one that failed are there.
pub fn draw(stem: &Path, plan: &Plan, sweep: &Sweep, report: &Report) -> Result<Vec<PathBuf>, PictureError> {
    let machine = machine(plan, report);
    let pictures = [("bound", bound(sweep, report)), ("waits", waits(sweep, report))];
    let mut files = Vec::new();
    for (name, (title, panels)) in pictures {
        let chart = Chart { title, subtitle: machine.clone(), panels, size: SIZE };
        for ending in ["svg", "png"] {
            let mut path = OsString::from(stem);
            path.push(format!("-{name}.{ending}"));
            let path = PathBuf::from(path);
            picture::save(&path, &chart)?;
            files.push(path);
        }
    }
    Ok(files)
}

/// One line about where the numbers come from.
fn machine(plan: &Plan, report: &Report) -> String {
    let repeats = report.rows.iter().map(|row| row.repeats.len()).max().unwrap_or(0);
    let seconds = plan.limits.run.as_secs_f64();
    let runs = if repeats > 1 { format!("median of {repeats} runs of {seconds} s") } else { format!("one run of {seconds} s") };
    let stopped = if report.interrupted { ", interrupted" } else { "" };
    format!("{} CPUs, {}; {runs} each{stopped}", plan.pcpus, report::place(plan))
}

/// The locks that have rows, in the order of the tables.
fn legend(report: &Report) -> Vec<&'static str> {
    let mut names = Vec::new();
    for row in &report.rows {
        if !names.contains(&row.lock) {
            names.push(row.lock);
        }
    }
    names
}

fn rows_of<'a>(report: &'a Report, sections: &Sections) -> impl Iterator<Item = &'a Row> + Clone {
    let inside = sections.inside;
    report.rows.iter().filter(move |row| row.inside == inside)
}

/// Share of the bound against overcommit.
fn bound(sweep: &Sweep, report: &Report) -> (String, Vec<Panel>) {
    let shares = report.rows.iter().filter_map(|row| row.share_of_bound).filter(|&share| share > 0.0);
    let (least, most) = shares.fold((0.1, 1.0), |(least, most): (f64, f64), share| (least.min(share), most.max(share)));
    let panels = sweep.sections().map(|sections| Panel {
        title: subtitle(sweep, &sections),
        x: Axis::overcommit(report.rows.iter().map(|row| row.overcommit)),
        y: Axis::percent("throughput, share of the bound", least, most * 1.2, true),
        lines: legend(report)
            .into_iter()
            .enumerate()
            .map(|(place, lock)| {
                let rows = rows_of(report, &sections).filter(|row| row.lock == lock);
                let points: Vec<_> = rows
                    .filter_map(|row| Some((row.overcommit.log2(), row.share_of_bound?.max(f64::MIN_POSITIVE).log10())))
                    .collect();
                Line { name: lock.into(), look: Look::of(lock, place), markers: points.clone(), points }
            })
            .collect(),
    });
    ("Throughput under overcommit; bound = best lock at one vCPU per CPU".into(), panels.into())
}

/// Share of acquisitions that waited longer, at the highest overcommit.
fn waits(sweep: &Sweep, report: &Report) -> (String, Vec<Panel>) {
    let highest = report.rows.iter().map(|row| row.overcommit).fold(0.0, f64::max);
    let measured = || report.rows.iter().filter(|row| row.overcommit == highest && !row.waits.is_empty());
    let longest = measured().map(|row| row.wait_us.max).fold(10.0, f64::max);
    let most: u64 = measured().map(|row| row.waits.iter().map(|bucket| bucket.count).sum()).max().unwrap_or(10);
    let least_share = (1.0 / most as f64).clamp(1e-6, 0.1);
    let (from, to) = (-2.0, (longest.log10() + 0.05).ceil());
    let panels = sweep.sections().map(|sections| Panel {
        title: subtitle(sweep, &sections),
        x: Axis {
            title: "wait for the lock, µs".into(),
            from,
            to,
            ticks: (from as i32..=to as i32).map(|exponent| (exponent.into(), power_of_ten(exponent))).collect(),
        },
        y: Axis::percent("share of acquisitions that waited longer", least_share, 1.0, false),
        lines: legend(report)
            .into_iter()
            .enumerate()
            .map(|(place, lock)| {
                let row = rows_of(report, &sections).find(|row| row.lock == lock && row.overcommit == highest);
                let points = row.map_or(Vec::new(), |row| longer(&row.waits, row.wait_us.max));
                let points: Vec<_> = points
                    .into_iter()
                    .map(|(x, y)| (x.log10().max(from), y.log10()))
                    .filter(|(_, y)| *y > least_share.log10() - 0.01)
                    .collect();
                Line { name: lock.into(), look: Look::of(lock, place), markers: along(&points, place), points }
            })
            .collect(),
    });
    (format!("Waits for the lock at {highest}x overcommit"), panels.into())
}

fn subtitle(sweep: &Sweep, sections: &Sections) -> String {
    format!("{} sections: {:.2} µs inside, {:.2} µs outside", sections.name, sweep.inside_us(sections), sweep.outside_us(sections))
}

/// For each length of wait, the share of all that were longer; ends at the longest.
fn longer(waits: &[WaitBucket], longest_us: f64) -> Vec<(f64, f64)> {
    let all: u64 = waits.iter().map(|bucket| bucket.count).sum();
    let mut left = all;
    let mut points = Vec::with_capacity(2 * waits.len());
    for bucket in waits {
        // Falls within the bucket, and stays level up to the next.
        points.push((bucket.from_us, left as f64 / all as f64));
        left -= bucket.count;
        let last = left == 0;
        let share = if last { bucket.count } else { left } as f64 / all as f64;
        points.push((if last { longest_us.clamp(bucket.from_us, bucket.to_us) } else { bucket.to_us }, share));
    }
    points
}

/// Points for markers along a line, each at another place than those of other lines; the last is the line's end.
fn along(points: &[(f64, f64)], place: usize) -> Vec<(f64, f64)> {
    /// Decades of wait between two markers of a line.
    const STEP: f64 = 1.0;
    let mut next = points.first().map_or(0.0, |(x, _)| x + STEP * (place % 7) as f64 / 7.0);
    let mut markers = Vec::new();
    for &(x, y) in points {
        if x >= next {
            markers.push((x, y));
            next = x + STEP;
        }
    }
    markers.extend(points.last());
    markers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_of_longer_waits_falls_from_one_and_ends_at_the_longest() {
        let waits = [(0.1, 90), (1.0, 9), (50.0, 1)].map(|(from_us, count)| WaitBucket { from_us, to_us: 1.1 * from_us, count });
        let points = longer(&waits, 52.0);
        assert_eq!(points.iter().map(|(_, share)| *share).collect::<Vec<_>>(), [1.0, 0.1, 0.1, 0.01, 0.01, 0.01]);
        assert!(points.is_sorted_by(|(x, _), (y, _)| x < y), "{points:?}");
        assert_eq!(points.last().unwrap().0, 52.0);
        assert_eq!(longer(&[], 0.0), []);
    }
}
