//! Whether KVM halts and kicks for a guest without a pvlock host.

use kvm_bindings::KVM_MAX_CPUID_ENTRIES;
use kvm_ioctls::{Cap, Kvm};

use super::cpu::Cpl;
use super::kind::{KvmError, KvmKind, open};

/// `KVM_FEATURE_PV_UNHALT` (Linux, Documentation/virt/kvm/x86/cpuid.rst).
pub(crate) const PV_UNHALT: u32 = 1 << 7;
/// Their leaf.
const KVM_FEATURES: u32 = 0x4000_0001;

/// What this KVM offers to guests: eax of its leaf of features.
pub(crate) fn kvm_features(kvm: &Kvm) -> u32 {
    let leaves = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).ok();
    leaves.and_then(|leaves| leaves.as_slice().iter().find(|leaf| leaf.function == KVM_FEATURES).map(|leaf| leaf.eax)).unwrap_or(0)
}

/// Why KVM does not halt and kick for a guest here.
#[derive(Debug, thiserror::Error)]
pub enum NoPvUnhalt {
    /// There is no VM.
    #[error("PV_UNHALT is KVM's own halt and kick, and threads have no KVM: use hardware KVM, or halt by doorbells")]
    NoVm,
    /// What KVM runs natively is user code, and that may neither halt nor make hypercalls.
    #[error(
        "PV_UNHALT needs hardware KVM (VT-x or SVM): on software KVM, guest code that may halt and make hypercalls does not \
         run natively; halt by doorbells here"
    )]
    Software,
    /// User code was asked for.
    #[error("PV_UNHALT needs a guest in CPL 0: user code can neither halt nor make hypercalls")]
    UserCode,
    /// This KVM does not offer it.
    #[error("this KVM offers no PV_UNHALT (no in-kernel interrupt controller, or switched off): halt by doorbells")]
    NotOffered,
    /// KVM cannot be used at all.
    #[error(transparent)]
    Kvm(#[from] KvmError),
}

/// Whether a guest at this level, on this kind of KVM, can halt and be kicked by KVM's own means.
///
/// # Errors
///
/// What stands against it.
pub fn check_pv_unhalt(kind: KvmKind, cpl: Cpl) -> Result<(), NoPvUnhalt> {
    match (kind, cpl) {
        (KvmKind::Software, _) => return Err(NoPvUnhalt::Software),
        (KvmKind::Hardware, Cpl::Three) => return Err(NoPvUnhalt::UserCode),
        (KvmKind::Hardware, Cpl::Zero) => {}
    }
    let kvm = open()?;
    if kvm_features(&kvm) & PV_UNHALT == 0 || !kvm.check_extension(Cap::Irqchip) {
        return Err(NoPvUnhalt::NotOffered);
    }
    Ok(())
}
