//! Who was on which CPU, and what happened to locks meanwhile: what maps and traces show, of a simulated run or of any other.
//!
//! As text it is one JSON object a line, times in ns:
//!
//! ```text
//! {"span":{"cpu":0,"start":1000,"end":5000,"vm":0,"vcpu":3}}
//! {"mark":{"kind":"park","cpu":0,"at":5000,"vm":0,"vcpu":3}}
//! {"mark":{"kind":"kick","cpu":1,"at":7000,"vm":0,"vcpu":1,"to":3}}
//! {"mark":{"kind":"hold","cpu":1,"at":6000,"end":7000,"vm":0,"vcpu":1}}
//! ```
//!
//! A span without `vm` is other work of the host.

use crate::outcome::{self, Recording};
use crate::params::Params;
use crate::scenario::MAX_CPUS;
use serde::{Deserialize, Serialize};

/// Somebody was on a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Span {
    /// Where.
    pub cpu: usize,
    /// From, in ns.
    pub start: u64,
    /// To, in ns.
    pub end: u64,
    /// Whose; none: other work of the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<usize>,
    /// Which of the VM's.
    #[serde(default)]
    pub vcpu: usize,
}

/// What a mark says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MarkKind {
    /// The vCPU went to sleep.
    Park,
    /// The vCPU ended a sleep, that of `to`.
    Kick,
    /// The vCPU had a lock, up to `end`.
    Hold,
    /// The vCPU waited for a lock, up to `end`.
    Wait,
}

/// Something happened to a vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mark {
    /// What.
    pub kind: MarkKind,
    /// Where the vCPU was, if that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<usize>,
    /// When, in ns.
    pub at: u64,
    /// Until when, in ns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<u64>,
    /// Whose.
    pub vm: usize,
    /// Which of the VM's.
    pub vcpu: usize,
    /// The other vCPU of this VM that it concerns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<usize>,
    /// Which of the VM's locks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lock: Option<usize>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
enum Entry {
    Span(Span),
    Mark(Mark),
}

/// A part of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    /// Of all CPUs.
    pub spans: Vec<Span>,
    /// Of all vCPUs.
    pub marks: Vec<Mark>,
}

/// A line that cannot be understood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {why}")]
pub struct ScheduleError {
    line: usize,
    why: String,
}

impl Schedule {
    /// That of a recording which began `from_ns` after measuring did.
    pub fn of(recording: &Recording, params: &Params, from_ns: u64) -> Self {
        let ns = |cycles: u64| from_ns + params.ns(cycles.clamp(recording.from, recording.to) - recording.from);
        let who = |task: usize| recording.tasks.get(task).copied().unwrap_or_default();
        let span = |span: &outcome::Span| {
            let (vm, vcpu) = who(span.task);
            Span { cpu: span.cpu, start: ns(span.start), end: ns(span.end), vm, vcpu }
        };
        let moment = |mark: &outcome::Mark| {
            // Other work of the host neither sleeps nor kicks.
            let (Some(vm), vcpu) = who(mark.task) else { return None };
            let (kind, to) = match mark.kind {
                outcome::MarkKind::Parked => (MarkKind::Park, None),
                outcome::MarkKind::Kicked(target) => (MarkKind::Kick, Some(who(target).1)),
            };
            Some(Mark { kind, cpu: Some(mark.cpu), at: ns(mark.at), end: None, vm, vcpu, to, lock: None })
        };
        let mut marks: Vec<Mark> = recording.marks.iter().filter_map(moment).collect();
        for hold in &recording.holds {
            let (Some(vm), vcpu) = who(hold.task) else { continue };
            for (kind, from, to) in [(MarkKind::Wait, hold.wanted, hold.taken), (MarkKind::Hold, hold.taken, hold.released)] {
                let (at, end) = (ns(from), ns(to));
                if at < end {
                    marks.push(Mark { kind, cpu: None, at, end: Some(end), vm, vcpu, to: None, lock: Some(hold.lock) });
                }
            }
        }
        let mut spans: Vec<Span> = recording.spans.iter().map(span).filter(|span| span.start < span.end).collect();
        spans.sort_by_key(|span| (span.start, span.cpu));
        marks.sort_by_key(|mark| (mark.at, mark.vm, mark.vcpu));
        Self { spans, marks }
    }

    /// Reads lines.
    ///
    /// # Errors
    ///
    /// The first line that is not as the format says, or impossible.
    pub fn read(text: &str) -> Result<Self, ScheduleError> {
        let mut schedule = Self::default();
        for (line, entry) in (1..).zip(text.lines()).filter(|(_, text)| !text.trim().is_empty()) {
            let wrong = |why: String| ScheduleError { line, why };
            let cpu = match serde_json::from_str(entry).map_err(|error| wrong(error.to_string()))? {
                Entry::Span(span) if span.start >= span.end => return Err(wrong("a span ends after it starts".into())),
                Entry::Mark(mark) if mark.end.is_some_and(|end| end < mark.at) => {
                    return Err(wrong("a mark does not end before it begins".into()));
                }
                Entry::Span(span) => {
                    schedule.spans.push(span);
                    Some(span.cpu)
                }
                Entry::Mark(mark) => {
                    schedule.marks.push(mark);
                    mark.cpu
                }
            };
            if cpu.is_some_and(|cpu| cpu >= MAX_CPUS) {
                return Err(wrong(format!("CPUs are numbered 0 to {}", MAX_CPUS - 1)));
            }
        }
        Ok(schedule)
    }

    /// As lines.
    pub fn write(&self) -> String {
        let spans = self.spans.iter().map(|&span| Entry::Span(span));
        let lines = spans.chain(self.marks.iter().map(|&mark| Entry::Mark(mark)));
        // Numbers always serialise.
        lines.map(|entry| serde_json::to_string(&entry).unwrap_or_default() + "\n").collect()
    }

    /// From the first to the last ns, if there is anything.
    pub fn extent(&self) -> Option<(u64, u64)> {
        let starts = self.spans.iter().map(|span| span.start).chain(self.marks.iter().map(|mark| mark.at));
        let ends = self.spans.iter().map(|span| span.end).chain(self.marks.iter().map(|mark| mark.end.unwrap_or(mark.at + 1)));
        Some((starts.min()?, ends.max()?))
    }

    /// One more than the largest CPU number.
    pub fn cpus(&self) -> usize {
        let cpus = self.spans.iter().map(|span| span.cpu).chain(self.marks.iter().filter_map(|mark| mark.cpu));
        cpus.max().map_or(0, |cpu| cpu + 1)
    }

    /// How many vCPUs each VM has, as far as can be seen.
    pub fn vms(&self) -> std::collections::BTreeMap<usize, usize> {
        let spans = self.spans.iter().filter_map(|span| Some((span.vm?, span.vcpu)));
        let mut vms = std::collections::BTreeMap::new();
        for (vm, vcpu) in spans.chain(self.marks.iter().map(|mark| (mark.vm, mark.vcpu))) {
            let vcpus = vms.entry(vm).or_insert(0);
            *vcpus = (*vcpus).max(vcpu + 1);
        }
        vms
    }

    /// The spans of each vCPU, in order of time.
    pub(crate) fn by_vcpu(&self) -> std::collections::BTreeMap<(usize, usize), Vec<Span>> {
        let mut spans = std::collections::BTreeMap::<_, Vec<Span>>::new();
        for span in &self.spans {
            if let Some(vm) = span.vm {
                spans.entry((vm, span.vcpu)).or_default().push(*span);
            }
        }
        spans.values_mut().for_each(|spans| spans.sort_by_key(|span| span.start));
        spans
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_as_they_were_written() {
        let text = "\
            {\"span\":{\"cpu\":0,\"start\":1,\"end\":5,\"vm\":0,\"vcpu\":3}}\n\
            {\"span\":{\"cpu\":1,\"start\":1,\"end\":9,\"vcpu\":0}}\n\
            {\"mark\":{\"kind\":\"park\",\"cpu\":0,\"at\":5,\"vm\":0,\"vcpu\":3}}\n\
            {\"mark\":{\"kind\":\"hold\",\"at\":2,\"end\":4,\"vm\":1,\"vcpu\":7}}\n";
        let schedule = Schedule::read(text).unwrap();
        assert_eq!(schedule.write(), text);
        assert_eq!((schedule.extent(), schedule.cpus()), (Some((1, 9)), 2));
        assert_eq!(schedule.vms().into_iter().collect::<Vec<_>>(), [(0, 4), (1, 8)]);
    }

    #[test]
    fn a_bad_line_is_refused_with_its_number() {
        let error = |line: &str| {
            Schedule::read(&format!("{{\"span\":{{\"cpu\":0,\"start\":1,\"end\":5}}}}\n\n{line}")).unwrap_err().to_string()
        };
        assert!(error("{\"span\":{\"cpu\":0,\"start\":5,\"end\":5}}").starts_with("line 3: a span ends after"));
        assert!(error("{\"span\":{\"cpu\":9999,\"start\":1,\"end\":5}}").contains("0 to 1023"));
        assert!(error("{\"span\":{\"cpu\":0,\"begin\":1,\"end\":5}}").contains("begin"));
        assert!(error("{\"mark\":{\"kind\":\"jump\",\"cpu\":0,\"at\":1,\"vm\":0,\"vcpu\":0}}").contains("jump"));
        assert!(error("{\"mark\":{\"kind\":\"hold\",\"cpu\":0,\"at\":9,\"end\":1,\"vm\":0,\"vcpu\":0}}").contains("line 3"));
        assert!(error("nonsense").starts_with("line 3"));
    }
}
