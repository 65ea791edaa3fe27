//! Which kind of KVM this machine has, and opening it.

use std::ffi::CStr;
use std::fmt;
use std::fs;
use std::io;

use kvm_ioctls::{Cap, Kvm};

/// The API version that KVM has had since Linux 2.6.22.
const KVM_API_VERSION: i32 = 12;

/// The device that [`open`] opens.
pub const DEVICE: &CStr = c"/dev/kvm";

/// How the KVM of this machine runs guest code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvmKind {
    /// With VT-x or SVM: guest kernel code (CPL 0) runs natively.
    Hardware,
    /// Without (`kvm_pvm` and the like): only guest user code (CPL 3) runs natively.
    Software,
}

impl KvmKind {
    /// Looks at `/proc/cpuinfo`. Unreadable means [`Software`](Self::Software), which is the
    /// safe guess: what runs there also runs on hardware.
    pub fn detect() -> Self {
        fs::read_to_string("/proc/cpuinfo").map_or(Self::Software, |text| Self::from_cpuinfo(&text))
    }

    /// Decides from the text of `/proc/cpuinfo`: hardware when a `flags` line has `vmx` or `svm`.
    pub fn from_cpuinfo(text: &str) -> Self {
        let virtualizes = text
            .lines()
            .filter_map(|line| line.split_once(':'))
            .filter(|(name, _)| name.trim() == "flags")
            .any(|(_, flags)| flags.split_whitespace().any(|flag| flag == "vmx" || flag == "svm"));
        if virtualizes { Self::Hardware } else { Self::Software }
    }

    /// The name used in output: `hardware` or `software`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hardware => "hardware",
            Self::Software => "software",
        }
    }
}

impl fmt::Display for KvmKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why KVM cannot be used here, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    /// There is no such device.
    #[error(
        "{device} does not exist: load the kvm module (kvm_intel or kvm_amd), enable virtualization in the \
         firmware, or pass the device into this container; or use --backend threads"
    )]
    Missing {
        /// Path that was tried.
        device: String,
    },
    /// The device is there but this user may not open it.
    #[error("no permission to open {device}: add this user to the group that owns it (usually `kvm`), or use --backend threads")]
    Permission {
        /// Path that was tried.
        device: String,
    },
    /// The device node exists but no driver answers.
    #[error("{device} has no driver behind it ({source}): load the kvm module, or use --backend threads")]
    NoDriver {
        /// Path that was tried.
        device: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// Something else went wrong while opening.
    #[error("cannot open {device}: {source}; use --backend threads to do without")]
    Open {
        /// Path that was tried.
        device: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// What answers is not a KVM that this program knows.
    #[error("{device} speaks KVM API version {found}, not {KVM_API_VERSION}: it is not KVM, or too old; use --backend threads")]
    ApiVersion {
        /// Path that was tried.
        device: String,
        /// Version that it reported; negative when it does not know the question.
        found: i32,
    },
    /// A feature that the VMM needs is missing.
    #[error("this KVM lacks {capability}: use Linux 4.13 or later, or --backend threads")]
    Capability {
        /// Name of the missing capability.
        capability: &'static str,
    },
}

/// Opens `/dev/kvm` and checks that it offers what this VMM uses.
///
/// # Errors
/// Any [`KvmError`].
pub fn open() -> Result<Kvm, KvmError> {
    open_at(DEVICE)
}

/// As [`open`], for another path.
///
/// # Errors
/// Any [`KvmError`].
pub fn open_at(path: &CStr) -> Result<Kvm, KvmError> {
    let device = path.to_string_lossy().into_owned();
    let kvm = match Kvm::new_with_path(path) {
        Ok(kvm) => kvm,
        Err(error) => {
            let source = io::Error::from(error);
            return Err(match source.raw_os_error() {
                Some(libc::ENOENT) => KvmError::Missing { device },
                Some(libc::EACCES | libc::EPERM) => KvmError::Permission { device },
                Some(libc::ENODEV | libc::ENXIO) => KvmError::NoDriver { device, source },
                _ => KvmError::Open { device, source },
            });
        }
    };
    let found = kvm.get_api_version();
    if found != KVM_API_VERSION {
        return Err(KvmError::ApiVersion { device, found });
    }
    for (capability, name) in [
        (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
        (Cap::ExtCpuid, "KVM_CAP_EXT_CPUID"),
        (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
    ] {
        if !kvm.check_extension(capability) {
            return Err(KvmError::Capability { capability: name });
        }
    }
    Ok(kvm)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_flags_decide_the_kind() {
        assert_eq!(KvmKind::from_cpuinfo("flags\t\t: fpu vmx sse\n"), KvmKind::Hardware);
        assert_eq!(KvmKind::from_cpuinfo("flags : fpu svm\n"), KvmKind::Hardware);
        assert_eq!(KvmKind::from_cpuinfo("flags : fpu svm_lock\nvmx flags : vmx\n"), KvmKind::Software);
        assert_eq!(KvmKind::from_cpuinfo(""), KvmKind::Software);
    }

    #[test]
    fn a_missing_device_says_what_to_do() {
        let error = open_at(c"/dev/no-such-kvm").expect_err("there is no such device");
        assert!(matches!(error, KvmError::Missing { .. }));
        assert!(error.to_string().contains("--backend threads"));
    }

    #[test]
    fn a_device_that_is_not_kvm_is_refused() {
        let error = open_at(c"/dev/null").expect_err("the null device is no KVM");
        assert!(matches!(error, KvmError::ApiVersion { .. }), "{error}");
    }
}
