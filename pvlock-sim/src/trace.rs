//! Traces in the trace-event format that Chrome's and Perfetto's viewers open: tracks with slices, moments and arrows.

use crate::schedule::{MarkKind, Schedule};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// One event, see the format's description; times in µs.
#[derive(Clone, Debug, Serialize)]
struct Event {
    ph: &'static str,
    name: String,
    pid: usize,
    tid: usize,
    ts: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cat: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<usize>,
    /// An arrow ends at the slice that contains its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    bp: Option<&'static str>,
    /// A moment is one of its track.
    #[serde(skip_serializing_if = "Option::is_none")]
    s: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    args: Option<Value>,
}

/// A track: a thread of a process, as the format calls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Track {
    /// Group of tracks.
    pub process: usize,
    /// Within it.
    pub thread: usize,
}

/// A trace.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    events: Vec<Event>,
    arrows: usize,
}

fn us(ns: u64) -> f64 {
    ns as f64 / 1000.0
}

impl Trace {
    fn event(&mut self, ph: &'static str, name: &str, track: Track, ns: u64) -> &mut Event {
        let Track { process: pid, thread: tid } = track;
        let event = Event {
            ph,
            name: name.to_owned(),
            pid,
            tid,
            ts: us(ns),
            dur: None,
            cat: None,
            id: None,
            bp: None,
            s: None,
            args: None,
        };
        let place = self.events.len();
        self.events.push(event);
        &mut self.events[place]
    }

    /// Names a group of tracks.
    pub fn process(&mut self, process: usize, name: &str) {
        self.event("M", "process_name", Track { process, thread: 0 }, 0).args = Some(json!({ "name": name }));
    }

    /// Names a track; they stand in the order of their numbers.
    pub fn thread(&mut self, track: Track, name: &str) {
        self.event("M", "thread_name", track, 0).args = Some(json!({ "name": name }));
        self.event("M", "thread_sort_index", track, 0).args = Some(json!({ "sort_index": track.thread }));
    }

    /// Something that lasted.
    pub fn slice(&mut self, track: Track, name: &str, kind: &'static str, (start, end): (u64, u64)) {
        let event = self.event("X", name, track, start);
        (event.dur, event.cat) = (Some(us(end - start)), Some(kind));
    }

    /// A moment.
    pub fn moment(&mut self, track: Track, name: &str, at: u64) {
        self.event("i", name, track, at).s = Some("t");
    }

    /// An arrow from one slice to another, which contain these moments.
    pub fn arrow(&mut self, name: &str, (from, start): (Track, u64), (to, end): (Track, u64)) {
        self.arrows += 1;
        let id = Some(self.arrows);
        let event = self.event("s", name, from, start);
        (event.id, event.cat) = (id, Some("arrow"));
        let event = self.event("f", name, to, end);
        (event.id, event.cat, event.bp) = (id, Some("arrow"), Some("e"));
    }

    /// As a file of the format.
    pub fn to_json(&self) -> String {
        // Numbers and strings always serialise.
        let events: Vec<_> = self.events.iter().map(|event| serde_json::to_string(event).unwrap_or_default()).collect();
        format!("{{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n{}\n]}}\n", events.join(",\n"))
    }

    /// Of a schedule: each VM has for each vCPU a track of the CPUs it was on, and one of the locks that it waited for and held;
    /// the host has one for each CPU.
    pub fn of(schedule: &Schedule) -> Self {
        let mut trace = Self::default();
        trace.process(0, "host");
        let on_cpu = |cpu| Track { process: 0, thread: cpu };
        for cpu in 0..schedule.cpus() {
            trace.thread(on_cpu(cpu), &format!("CPU {cpu}"));
        }
        let runs = |vm, vcpu| Track { process: vm + 1, thread: 2 * vcpu };
        let locks = |vm, vcpu| Track { process: vm + 1, thread: 2 * vcpu + 1 };
        for (vm, vcpus) in schedule.vms() {
            trace.process(vm + 1, &format!("VM {vm}"));
            for vcpu in 0..vcpus {
                trace.thread(runs(vm, vcpu), &format!("vCPU {vcpu}"));
                trace.thread(locks(vm, vcpu), &format!("vCPU {vcpu} locks"));
            }
        }
        for span in &schedule.spans {
            let time = (span.start, span.end);
            match span.vm {
                Some(vm) => {
                    trace.slice(on_cpu(span.cpu), &format!("VM {vm} vCPU {}", span.vcpu), "cpu", time);
                    trace.slice(runs(vm, span.vcpu), &format!("CPU {}", span.cpu), "vcpu", time);
                }
                None => trace.slice(on_cpu(span.cpu), "other work", "cpu", time),
            }
        }
        let spans = schedule.by_vcpu();
        // The next time that a vCPU is on a CPU, at this moment or later.
        let next = |vm, vcpu, at| {
            let spans = spans.get(&(vm, vcpu)).map_or(&[][..], Vec::as_slice);
            spans.get(spans.partition_point(|span| span.end <= at)).map(|span| span.start.max(at))
        };
        for mark in &schedule.marks {
            let lock = mark.lock.map_or("lock".to_owned(), |lock| format!("lock {lock}"));
            match (mark.kind, mark.end) {
                (MarkKind::Park, _) => trace.moment(runs(mark.vm, mark.vcpu), "park", mark.at),
                (MarkKind::Kick, _) => {
                    trace.moment(runs(mark.vm, mark.vcpu), "kick", mark.at);
                    // An arrow needs a slice at either end.
                    if let Some((to, (from, at))) =
                        mark.to.and_then(|to| Some((to, (next(mark.vm, mark.vcpu, mark.at)?, next(mark.vm, to, mark.at)?))))
                        && from == mark.at
                    {
                        trace.arrow("kick", (runs(mark.vm, mark.vcpu), from), (runs(mark.vm, to), at));
                    }
                }
                (MarkKind::Wait, Some(end)) => {
                    trace.slice(locks(mark.vm, mark.vcpu), &format!("wait for {lock}"), "wait", (mark.at, end))
                }
                (MarkKind::Hold, Some(end)) => {
                    trace.slice(locks(mark.vm, mark.vcpu), &format!("hold {lock}"), "hold", (mark.at, end))
                }
                (MarkKind::Wait | MarkKind::Hold, None) => trace.moment(locks(mark.vm, mark.vcpu), &lock, mark.at),
            }
        }
        trace
    }
}

/// What is wrong with a text that should be a trace, for tests: not JSON, events without what their kind needs, slices of one
/// track that overlap without nesting, arrows without both ends or an end in no slice.
pub fn check(text: &str) -> Result<(), String> {
    let trace: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let events = trace["traceEvents"].as_array().ok_or("no traceEvents")?;
    let number = |event: &Value, key: &str| event[key].as_f64().ok_or(format!("no {key} in {event}"));
    let nanoseconds = |us: f64| (us * 1000.0).round() as u64;
    let mut slices = std::collections::BTreeMap::<(u64, u64), Vec<(u64, u64)>>::new();
    for event in events {
        let track = (number(event, "pid")? as u64, number(event, "tid")? as u64);
        let at = nanoseconds(number(event, "ts")?);
        if event["ph"] == "X" {
            slices.entry(track).or_default().push((at, at + nanoseconds(number(event, "dur")?)));
        }
    }
    for (track, slices) in &mut slices {
        slices.sort_by_key(|&(start, end)| (start, std::cmp::Reverse(end)));
        let mut open: Vec<u64> = Vec::new();
        for &(start, end) in slices.iter() {
            open.retain(|&outer| outer > start);
            if open.last().is_some_and(|&outer| end > outer) {
                return Err(format!("the slice {start} to {end} of track {track:?} ends outside the one that it begins in"));
            }
            open.push(end);
        }
    }
    let (mut starts, mut ends) = (BTreeSet::new(), BTreeSet::new());
    for event in events.iter().filter(|event| event["ph"] == "s" || event["ph"] == "f") {
        let track = (number(event, "pid")? as u64, number(event, "tid")? as u64);
        let at = nanoseconds(number(event, "ts")?);
        let inside = slices.get(&track).is_some_and(|slices| slices.iter().any(|&(start, end)| (start..=end).contains(&at)));
        if !inside {
            return Err(format!("an arrow in no slice: {event}"));
        }
        let side = if event["ph"] == "s" { &mut starts } else { &mut ends };
        if !side.insert(number(event, "id")? as u64) {
            return Err(format!("an arrow twice: {event}"));
        }
    }
    if starts == ends {
        Ok(())
    } else {
        Err(format!("arrows with one end: {:?}", starts.symmetric_difference(&ends).collect::<Vec<_>>()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_nest_and_arrows_have_both_ends() {
        let schedule = Schedule::read(
            "{\"span\":{\"cpu\":0,\"start\":1000,\"end\":5000,\"vm\":0,\"vcpu\":0}}
             {\"span\":{\"cpu\":1,\"start\":1000,\"end\":2000,\"vm\":0,\"vcpu\":1}}
             {\"span\":{\"cpu\":1,\"start\":4000,\"end\":5000,\"vm\":0,\"vcpu\":1}}
             {\"mark\":{\"kind\":\"wait\",\"at\":1500,\"end\":4200,\"vm\":0,\"vcpu\":1,\"lock\":0}}
             {\"mark\":{\"kind\":\"hold\",\"at\":4200,\"end\":4800,\"vm\":0,\"vcpu\":1,\"lock\":0}}
             {\"mark\":{\"kind\":\"park\",\"cpu\":1,\"at\":2000,\"vm\":0,\"vcpu\":1}}
             {\"mark\":{\"kind\":\"kick\",\"cpu\":0,\"at\":3000,\"vm\":0,\"vcpu\":0,\"to\":1}}
             {\"mark\":{\"kind\":\"kick\",\"cpu\":0,\"at\":4900,\"vm\":0,\"vcpu\":0,\"to\":7}}",
        );
        let text = Trace::of(&schedule.unwrap()).to_json();
        assert_eq!(check(&text), Ok(()), "{text}");
        let trace: Value = serde_json::from_str(&text).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let of = |ph: &str| events.iter().filter(|event| event["ph"] == ph).collect::<Vec<_>>();
        assert_eq!(of("s").len(), 1, "who is not seen again gets no arrow");
        assert_eq!((of("s")[0]["ts"].as_f64(), of("f")[0]["ts"].as_f64()), (Some(3.0), Some(4.0)));
        assert_eq!(of("i").len(), 3);
        let names: Vec<_> = of("X").iter().map(|event| event["name"].as_str().unwrap().to_owned()).collect();
        assert!(names.contains(&"wait for lock 0".into()) && names.contains(&"hold lock 0".into()), "{names:?}");
    }

    #[test]
    fn the_check_sees_what_is_wrong() {
        let track = Track { process: 1, thread: 0 };
        let mut trace = Trace::default();
        trace.slice(track, "a", "", (0, 100));
        trace.slice(track, "b", "", (50, 150));
        assert!(check(&trace.to_json()).unwrap_err().contains("outside"));
        let mut trace = Trace::default();
        trace.slice(track, "a", "", (0, 100));
        trace.arrow("x", (track, 50), (track, 200));
        assert!(check(&trace.to_json()).unwrap_err().contains("no slice"));
        trace.slice(track, "b", "", (200, 300));
        assert_eq!(check(&trace.to_json()), Ok(()));
        trace.events.pop();
        trace.events.retain(|event| event.ph != "f");
        assert!(check(&trace.to_json()).unwrap_err().contains("one end"));
        assert!(check("{").is_err());
    }
}
