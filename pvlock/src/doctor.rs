//! `pvlock doctor`: what this machine offers, and what follows from it for the choice of back-end and policy.

use crate::vm::{self, KvmKind};
use kvm_ioctls::{Cap, Kvm};
use std::fmt;
use std::path::{Path, PathBuf};

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What was looked at.
    pub what: &'static str,
    /// What is there.
    pub found: String,
    /// What follows from it.
    pub so: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<22} {}: {}", self.what, self.found, self.so)
    }
}

fn finding(what: &'static str, found: impl Into<String>, so: impl Into<String>) -> Finding {
    Finding { what, found: found.into(), so: so.into() }
}

/// Looks at everything. Changes nothing, and needs no right that `pvlock run` does not need.
pub fn examine() -> Vec<Finding> {
    let kvm = vm::open();
    let mut findings = vec![match &kvm {
        Ok(_) => device(KvmKind::detect()),
        Err(error) => finding("/dev/kvm", "not usable", error.to_string()),
    }];
    if let Ok(kvm) = &kvm {
        findings.extend(capabilities(kvm, KvmKind::detect()));
    }
    findings.extend(Files::new("/").findings());
    findings
}

fn device(kind: KvmKind) -> Finding {
    match kind {
        KvmKind::Hardware => finding(
            "/dev/kvm",
            "usable, hardware",
            "guest kernels run natively; pause-loop exits happen, but KVM deals with them and shows them to nobody",
        ),
        KvmKind::Software => finding(
            "/dev/kvm",
            "usable, software",
            "the guest runs in CPL 3 and an exit costs tens of microseconds: long spin budgets, few halts; no pause-loop exits",
        ),
    }
}

/// `KVM_FEATURE_STEAL_TIME` (Linux, Documentation/virt/kvm/x86/cpuid.rst).
const STEAL_TIME: u32 = 1 << 5;

fn capabilities(kvm: &Kvm, kind: KvmKind) -> Vec<Finding> {
    let features = vm::kvm_features(kvm);
    let offered = |there: bool| if there { "offered" } else { "not offered" };
    let has = |cap| kvm.check_extension(cap);
    vec![
        finding(
            "vCPUs of a VM",
            format!("{} advised, {} at most", kvm.get_nr_vcpus(), kvm.get_max_vcpus()),
            "more vCPUs than CPUs is what pvlock is for",
        ),
        finding(
            "steal time",
            offered(features & STEAL_TIME != 0),
            if features & STEAL_TIME != 0 {
                "its `preempted` flag can tell `Driver::with_placement` whom to yield to; nobody is parked because of it"
            } else {
                "whether a running vCPU is preempted is unknown: park-on-holder becomes a yield, park-on-previous still works"
            },
        ),
        finding(
            "PV_UNHALT",
            offered(features & vm::PV_UNHALT != 0),
            if features & vm::PV_UNHALT != 0 && kind == KvmKind::Hardware {
                "a guest without pvlock's host can halt and kick through KVM itself (`pvlock run --halt pv-unhalt`)"
            } else {
                "a guest without pvlock's host can only spin"
            },
        ),
        finding(
            "ioeventfd",
            offered(has(Cap::Ioeventfd)),
            if has(Cap::Ioeventfd) {
                "kicks can be taken by another thread than the vCPU's"
            } else {
                "each kick is an exit of the vCPU that kicks"
            },
        ),
        finding(
            "MSR exits",
            offered(has(Cap::X86UserSpaceMsr)),
            if has(Cap::X86UserSpaceMsr) {
                "the doorbell can be an MSR as well as a port"
            } else {
                "the doorbell is a port or MMIO"
            },
        ),
    ]
}

/// What files say. The root is another one in tests.
struct Files {
    root: PathBuf,
}

impl Files {
    fn new(root: impl AsRef<Path>) -> Self {
        Self { root: root.as_ref().to_path_buf() }
    }

    /// The first line of a file, if it can be read.
    fn line(&self, path: &str) -> Option<String> {
        let text = std::fs::read_to_string(self.root.join(path)).ok()?;
        Some(text.lines().next().unwrap_or_default().trim().to_owned())
    }

    fn findings(&self) -> Vec<Finding> {
        vec![self.pause_loops(), self.halt_polling(), self.huge_pages(), self.cpus(), self.quota()]
    }

    fn pause_loops(&self) -> Finding {
        const WHAT: &str = "pause-loop exits";
        let report = "a guest that wants the host's help reports its spinning (`pvlock run --policy`)";
        // The module's parameter for the window, and that which turns it off when it is 0.
        let places = [("kvm_intel", "ple_window", "ple_gap"), ("kvm_amd", "pause_filter_count", "pause_filter_count")];
        for (module, window, switch) in places {
            let parameter = |name| self.line(&format!("sys/module/{module}/parameters/{name}"));
            let Some(value) = parameter(window) else { continue };
            return if parameter(switch).as_deref() == Some("0") {
                finding(WHAT, format!("switched off in {module}"), format!("waiters spin through their time slice; {report}"))
            } else {
                let so = format!("KVM answers each with a directed yield of its own; {report}");
                finding(WHAT, format!("{module}, window {value}"), so)
            };
        }
        finding(WHAT, "no parameters to read", format!("none, or not shown; {report}"))
    }

    fn halt_polling(&self) -> Finding {
        const WHAT: &str = "halt polling";
        match self.line("sys/module/kvm/parameters/halt_poll_ns") {
            None => finding(WHAT, "no parameter to read", "nothing follows"),
            Some(ns) if ns == "0" => finding(WHAT, "off", "a `hlt` in KVM gives up its CPU at once"),
            Some(ns) => finding(
                WHAT,
                format!("up to {ns} ns"),
                "concerns `hlt` in KVM only: pvlock's sleepers wait in user space and never poll",
            ),
        }
    }

    fn huge_pages(&self) -> Finding {
        const WHAT: &str = "huge pages";
        let Some(modes) = self.line("sys/kernel/mm/transparent_hugepage/enabled") else {
            return finding(WHAT, "not there", "guest RAM is of small pages, and first touches cost more");
        };
        let chosen = modes.split_whitespace().find_map(|mode| mode.strip_prefix('[')?.strip_suffix(']')).unwrap_or("?").to_owned();
        let so = match chosen.as_str() {
            "always" | "madvise" => "guest RAM can have them",
            _ => "guest RAM is of small pages, and first touches cost more",
        };
        finding(WHAT, chosen, so)
    }

    fn cpus(&self) -> Finding {
        let allowed = std::fs::read_to_string(self.root.join("proc/self/status")).ok().and_then(|status| {
            let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
            count_list(line.trim())
        });
        match allowed {
            None => finding("CPUs", "cannot be read", "give --vcpus instead of --overcommit"),
            Some(1) => finding("CPUs", "1 allowed", "two vCPUs never run at once: spinning is always in vain"),
            Some(n) => {
                let so = format!(
                    "--dedicated is for {n} vCPUs or fewer, and nothing else on these CPUs; else --policy yield or park-on-previous"
                );
                finding("CPUs", format!("{n} allowed"), so)
            }
        }
    }

    fn quota(&self) -> Finding {
        const WHAT: &str = "cgroup quota";
        let group = std::fs::read_to_string(self.root.join("proc/self/cgroup")).unwrap_or_default();
        let of = |controller: &str| {
            group.lines().find_map(|line| {
                let mut fields = line.splitn(3, ':').skip(1);
                let controllers = fields.next()?;
                let path = fields.next()?;
                controllers.split(',').any(|name| name == controller).then(|| path.trim_matches('/').to_owned())
            })
        };
        let two = of("").and_then(|path| self.line(&format!("sys/fs/cgroup/{path}/cpu.max")));
        let one = || {
            let path = of("cpu")?;
            let read = |name| self.line(&format!("sys/fs/cgroup/cpu/{path}/cpu.{name}"));
            Some(format!("{} {}", read("cfs_quota_us")?, read("cfs_period_us")?))
        };
        let Some(limit) = two.or_else(one) else { return finding(WHAT, "none found", "CPUs are as many as are allowed") };
        let mut numbers = limit.split_whitespace().map(str::parse::<f64>);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(quota)), Some(Ok(period))) if quota > 0.0 && period > 0.0 => finding(
                WHAT,
                format!("{:.2} CPUs", quota / period),
                "whole groups of vCPUs stop together when it is used up: never --dedicated, and expect waits of a period",
            ),
            _ => finding(WHAT, "unlimited", "CPUs are as many as are allowed"),
        }
    }
}

/// How many numbers a list such as `0-3,8` names.
fn count_list(list: &str) -> Option<usize> {
    list.split(',').try_fold(0, |sum, range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        Some(sum + last.checked_sub(first)? + 1)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory with these files, removed at the end.
    struct Machine(PathBuf);

    impl Machine {
        fn with(name: &str, files: &[(&str, &str)]) -> Self {
            let root = std::env::temp_dir().join(format!("pvlock-doctor-{}-{name}", std::process::id()));
            for (path, text) in files {
                let path = root.join(path);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, text).unwrap();
            }
            Self(root)
        }
    }

    impl Drop for Machine {
        fn drop(&mut self) {
            // Nothing was written if there were no files.
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn each_machine_gets_its_findings() {
        type Case = (&'static str, &'static [(&'static str, &'static str)], [&'static str; 5]);
        let cases: [Case; 3] = [
            ("nothing", &[], ["no parameters to read", "no parameter to read", "not there", "cannot be read", "none found"]),
            (
                "intel",
                &[
                    ("sys/module/kvm_intel/parameters/ple_window", "4096\n"),
                    ("sys/module/kvm_intel/parameters/ple_gap", "128\n"),
                    ("sys/module/kvm/parameters/halt_poll_ns", "200000\n"),
                    ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
                    ("proc/self/status", "Name:\tx\nCpus_allowed_list:\t0-3,8\n"),
                    ("proc/self/cgroup", "0::/a/b\n"),
                    ("sys/fs/cgroup/a/b/cpu.max", "150000 100000\n"),
                ],
                ["kvm_intel, window 4096", "up to 200000 ns", "madvise", "5 allowed", "1.50 CPUs"],
            ),
            (
                "amd",
                &[
                    ("sys/module/kvm_amd/parameters/pause_filter_count", "0\n"),
                    ("sys/module/kvm/parameters/halt_poll_ns", "0\n"),
                    ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n"),
                    ("proc/self/status", "Cpus_allowed_list:\t2\n"),
                    ("proc/self/cgroup", "4:cpu,cpuacct:/c\n0::/\n"),
                    ("sys/fs/cgroup/cpu/c/cpu.cfs_quota_us", "-1\n"),
                    ("sys/fs/cgroup/cpu/c/cpu.cfs_period_us", "100000\n"),
                ],
                ["switched off in kvm_amd", "off", "never", "1 allowed", "unlimited"],
            ),
        ];
        for (name, files, expected) in cases {
            let machine = Machine::with(name, files);
            let findings = Files::new(&machine.0).findings();
            let found: Vec<_> = findings.iter().map(|finding| finding.found.as_str()).collect();
            assert_eq!(found, expected, "{name}");
            assert!(findings.iter().all(|finding| !finding.so.is_empty() && !finding.to_string().contains('\n')));
        }
    }

    #[test]
    fn lists_of_cpus_are_counted_and_nonsense_is_not() {
        for (list, count) in [("0", Some(1)), ("0-7", Some(8)), ("1,3,5-6", Some(4)), ("", None), ("7-0", None), ("x", None)] {
            assert_eq!(count_list(list), count, "{list:?}");
        }
    }
}
