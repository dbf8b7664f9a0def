//! What the processes of a container may do: capabilities, privilege escalation, system calls.
//!
//! [`Security::apply`] is the last step before a process becomes the command of a container, and the same for `exec`.

use std::{collections::BTreeMap, fmt};

use rustix::{
    io::Errno,
    process::Uid,
    thread::{
        CapabilitySet, CapabilitySets, capabilities, remove_capability_from_bounding_set, set_capabilities,
        set_no_new_privs, set_thread_uid,
    },
};
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};
use serde::{Deserialize, Serialize};

use crate::sys;
use berth_host::{Error, Result};

/// Capabilities of Linux, written by their names without `CAP_`.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<String>", into = "Vec<String>")]
pub struct Capabilities(CapabilitySet);

/// What the processes of a container may do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a switch of its own, as it is in a pod's securityContext"
)]
pub struct Security {
    /// The capabilities that a process of root has, and that no process can go beyond.
    pub capabilities: Capabilities,
    /// Whether no program, by its setuid bit or its file capabilities, gains rights that its caller does not have.
    pub no_new_privileges: bool,
    /// Whether the system calls are refused that reach beyond the container and that its capabilities do not call for.
    pub seccomp: bool,
    /// Whether files below `/proc` and `/sys` that concern the whole machine are masked or read-only.
    pub mask_kernel_files: bool,
    /// Whether the container has all devices of the host, and a writable `/sys`.
    pub host_devices: bool,
}

impl Security {
    /// Everything that the caller may do itself: the container is no restriction.
    pub fn privileged() -> Self {
        Self {
            capabilities: Capabilities::available(),
            no_new_privileges: false,
            seccomp: false,
            mask_kernel_files: false,
            host_devices: true,
        }
    }

    /// Restricts this process, which must be root, and makes it the user `user`.
    pub(crate) fn apply(&self, user: Uid) -> Result<()> {
        if self.seccomp {
            let filters = system_call_filters(self.capabilities.0)
                .map_err(|error| Error::new("compile the seccomp filter", std::io::Error::other(error)))?;
            for filter in filters {
                sys::set_seccomp_filter(&filter)
                    .map_err(|error| Error::new("restrict the system calls of the container", error))?;
            }
        }
        let limit = |errno: Errno| Error::new("limit the capabilities of the container", errno);
        // Bit by bit: a kernel may have capabilities that have no name here yet.
        let every = (0..u64::BITS).map(|bit| CapabilitySet::from_bits_retain(1 << bit));
        for capability in every.filter(|one| !self.capabilities.0.contains(*one)) {
            match remove_capability_from_bounding_set(capability) {
                // This kernel does not know it, so nobody has it.
                Ok(()) | Err(Errno::INVAL) => {}
                Err(errno) => return Err(limit(errno)),
            }
        }
        set_thread_uid(user).map_err(|errno| Error::new(format!("become user {}", user.as_raw()), errno))?;
        // Another user than root has lost its capabilities already.
        if user.is_root() {
            let kept = self.capabilities.0;
            let sets =
                CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
            set_capabilities(None, sets).map_err(limit)?;
        }
        if self.no_new_privileges {
            set_no_new_privs(true).map_err(|errno| Error::new("refuse privilege escalation", errno))?;
        }
        Ok(())
    }
}

impl Default for Security {
    /// What a container has whose pod asks for nothing.
    fn default() -> Self {
        Self {
            capabilities: Capabilities::standard(),
            no_new_privileges: false,
            seccomp: false,
            mask_kernel_files: true,
            host_devices: false,
        }
    }
}

impl Capabilities {
    /// No capability at all.
    pub fn none() -> Self {
        Self(CapabilitySet::empty())
    }

    /// Those of the caller, the most that a container can have.
    pub fn available() -> Self {
        Self(capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.permitted))
    }

    /// Those that container runtimes give by default, without MKNOD: there is no list of allowed devices that would
    /// keep a process with it from the disks of the host.
    pub fn standard() -> Self {
        let standard = CapabilitySet::AUDIT_WRITE
            | CapabilitySet::CHOWN
            | CapabilitySet::DAC_OVERRIDE
            | CapabilitySet::FOWNER
            | CapabilitySet::FSETID
            | CapabilitySet::KILL
            | CapabilitySet::NET_BIND_SERVICE
            | CapabilitySet::NET_RAW
            | CapabilitySet::SETFCAP
            | CapabilitySet::SETGID
            | CapabilitySet::SETPCAP
            | CapabilitySet::SETUID
            | CapabilitySet::SYS_CHROOT;
        Self(standard & Self::available().0)
    }

    /// The capability of a name such as `NET_ADMIN` or `CAP_NET_ADMIN`, if there is one.
    pub fn named(name: &str) -> Option<Self> {
        CapabilitySet::from_name(name.strip_prefix("CAP_").unwrap_or(name)).map(Self)
    }

    /// These and those of `other`.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// These without those of `other`.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0.difference(other.0))
    }

    /// Whether all of `other` are among these.
    pub fn contain(self, other: Self) -> bool {
        self.0.contains(other.0)
    }
}

impl fmt::Debug for Capabilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.iter_names().map(|(name, _)| name)).finish()
    }
}

impl From<Capabilities> for Vec<String> {
    fn from(capabilities: Capabilities) -> Self {
        capabilities.0.iter_names().map(|(name, _)| name.to_owned()).collect()
    }
}

impl TryFrom<Vec<String>> for Capabilities {
    type Error = String;

    fn try_from(names: Vec<String>) -> std::result::Result<Self, String> {
        names.iter().try_fold(Self::none(), |all, name| {
            let one = Self::named(name).ok_or_else(|| format!("{name:?} is no capability"))?;
            Ok(all.with(one))
        })
    }
}

/// System calls that nobody in a container needs: keys of the machine, its kernel and swap, interfaces that are seldom
/// used and often attacked.
const REFUSED: &[libc::c_long] = &[
    libc::SYS_add_key,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_setup,
    libc::SYS_kexec_file_load,
    libc::SYS_kexec_load,
    libc::SYS_keyctl,
    libc::SYS_lookup_dcookie,
    libc::SYS_nfsservctl,
    libc::SYS_pivot_root,
    libc::SYS_request_key,
    libc::SYS_swapoff,
    libc::SYS_swapon,
    libc::SYS_userfaultfd,
    #[cfg(target_arch = "x86_64")]
    libc::SYS__sysctl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_sysfs,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_uselib,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_ustat,
];

/// System calls that are refused to a container without the capability.
const REFUSED_WITHOUT: &[(CapabilitySet, &[libc::c_long])] = &[
    (
        CapabilitySet::SYS_ADMIN,
        &[
            libc::SYS_fanotify_init,
            libc::SYS_fsconfig,
            libc::SYS_fsmount,
            libc::SYS_fsopen,
            libc::SYS_fspick,
            libc::SYS_mount,
            libc::SYS_mount_setattr,
            libc::SYS_move_mount,
            libc::SYS_open_tree,
            libc::SYS_quotactl,
            libc::SYS_quotactl_fd,
            libc::SYS_setdomainname,
            libc::SYS_sethostname,
            libc::SYS_setns,
            libc::SYS_umount2,
            libc::SYS_unshare,
        ],
    ),
    (CapabilitySet::SYS_ADMIN.union(CapabilitySet::BPF), &[libc::SYS_bpf]),
    (CapabilitySet::SYS_ADMIN.union(CapabilitySet::PERFMON), &[libc::SYS_perf_event_open]),
    (CapabilitySet::SYS_ADMIN.union(CapabilitySet::SYSLOG), &[libc::SYS_syslog]),
    (CapabilitySet::DAC_READ_SEARCH, &[libc::SYS_open_by_handle_at]),
    (CapabilitySet::SYS_BOOT, &[libc::SYS_reboot]),
    (CapabilitySet::SYS_MODULE, &[libc::SYS_delete_module, libc::SYS_finit_module, libc::SYS_init_module]),
    (
        CapabilitySet::SYS_NICE,
        &[
            libc::SYS_get_mempolicy,
            libc::SYS_mbind,
            libc::SYS_migrate_pages,
            libc::SYS_move_pages,
            libc::SYS_set_mempolicy,
        ],
    ),
    (CapabilitySet::SYS_PACCT, &[libc::SYS_acct]),
    (CapabilitySet::SYS_PTRACE, &[libc::SYS_kcmp, libc::SYS_pidfd_getfd]),
    #[cfg(target_arch = "x86_64")]
    (CapabilitySet::SYS_RAWIO, &[libc::SYS_ioperm, libc::SYS_iopl]),
    (CapabilitySet::SYS_TIME, &[libc::SYS_clock_settime, libc::SYS_settimeofday]),
    (CapabilitySet::SYS_TTY_CONFIG, &[libc::SYS_vhangup]),
];

/// Flags of clone(2) that make a namespace.
const NAMESPACES: [libc::c_int; 8] = [
    libc::CLONE_NEWCGROUP,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWNET,
    libc::CLONE_NEWNS,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWTIME,
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWUTS,
];

/// Values of personality(2) that change nothing of how addresses are protected, and the question what is set.
const PERSONALITIES: [u64; 5] = [0, 0x8, 0x2_0000, 0x2_0008, 0xffff_ffff];

/// Programs of the x32 interface call the same functions by numbers with this bit.
#[cfg(target_arch = "x86_64")]
const X32: libc::c_long = 0x4000_0000;

/// The filters for a container with these capabilities: what is refused, and what seems not to exist.
fn system_call_filters(given: CapabilitySet) -> std::result::Result<[BpfProgram; 2], BackendError> {
    let first = |operator, value| SeccompCondition::new(0, SeccompCmpArgLen::Dword, operator, value);
    let mut refused: BTreeMap<i64, Vec<SeccompRule>> =
        REFUSED.iter().map(|call| (*call, Vec::new())).collect();
    for (needed, calls) in REFUSED_WITHOUT {
        if !given.intersects(*needed) {
            refused.extend(calls.iter().map(|call| (*call, Vec::new())));
        }
    }
    let other = PERSONALITIES.iter().map(|value| first(SeccompCmpOp::Ne, *value));
    refused.insert(
        libc::SYS_personality,
        vec![SeccompRule::new(other.collect::<std::result::Result<_, _>>()?)?],
    );
    let mut missing = BTreeMap::new();
    if !given.contains(CapabilitySet::SYS_ADMIN) {
        let mut rules = Vec::new();
        for flag in NAMESPACES {
            let flag = u64::from(flag.cast_unsigned());
            rules.push(SeccompRule::new(vec![first(SeccompCmpOp::MaskedEq(flag), flag)?])?);
        }
        refused.insert(libc::SYS_clone, rules);
        // Its flags lie in memory, where no filter sees them. C libraries fall back to clone.
        missing.insert(libc::SYS_clone3, Vec::new());
    }
    #[cfg(target_arch = "x86_64")]
    for calls in [&mut refused, &mut missing] {
        let again: Vec<_> = calls.iter().map(|(call, rules)| (call | X32, rules.clone())).collect();
        calls.extend(again);
    }
    Ok([filter(refused, Errno::PERM)?, filter(missing, Errno::NOSYS)?])
}

fn filter(
    calls: BTreeMap<i64, Vec<SeccompRule>>,
    errno: Errno,
) -> std::result::Result<BpfProgram, BackendError> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    let answer = SeccompAction::Errno(errno.raw_os_error().cast_unsigned());
    SeccompFilter::new(calls, SeccompAction::Allow, answer, arch)?.try_into()
}
