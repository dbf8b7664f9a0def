//! What kind of machine this is, read from the kernel and from /etc.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::path::Path;

use berth_host::usage;

/// What the kubelet keeps back of the memory by default before it evicts pods.
const MEMORY_RESERVE: u64 = 100 << 20;
/// Less free space than this, and than a tenth of the disk, is too little.
const LITTLE_SPACE: u64 = 1 << 30;

/// What pods may use of this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Allocatable {
    /// The processors of the machine, in thousandths of one.
    pub cpu_millis: u64,
    /// The memory of the machine in bytes.
    pub memory: u64,
    /// Bytes on the disk of the node's directory.
    pub ephemeral_storage: u64,
    /// Pods at the same time.
    pub pods: u32,
}

/// What does not change while the machine runs.
#[derive(Debug, Clone)]
pub(super) struct Facts {
    pub(super) capacity: Allocatable,
    pub(super) allocatable: Allocatable,
    pub(super) address: IpAddr,
    pub(super) machine_id: String,
    pub(super) system_uuid: String,
    pub(super) boot_id: String,
    pub(super) kernel: String,
    pub(super) os_image: String,
}

impl Facts {
    /// Looks at the machine; what cannot be read is empty or zero, as in the kubelet's report.
    pub(super) fn read(data_dir: &Path, pods: u32, address: Option<IpAddr>) -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from) as u64;
        let capacity = Allocatable {
            cpu_millis: cpus * 1000,
            memory: fs::read_to_string("/proc/meminfo").ok().and_then(|text| memory(&text)).unwrap_or(0),
            ephemeral_storage: usage::space(data_dir).map_or(0, |space| space.total),
            pods,
        };
        let allocatable = Allocatable {
            memory: capacity.memory.saturating_sub(MEMORY_RESERVE),
            ephemeral_storage: capacity.ephemeral_storage / 10 * 9,
            ..capacity
        };
        let machine_id = line("/etc/machine-id");
        let system_uuid = Some(line("/sys/class/dmi/id/product_uuid"))
            .filter(|uuid| !uuid.is_empty())
            .unwrap_or_else(|| machine_id.clone());
        Self {
            capacity,
            allocatable,
            address: address.unwrap_or_else(own_address),
            machine_id,
            system_uuid,
            boot_id: line("/proc/sys/kernel/random/boot_id"),
            kernel: line("/proc/sys/kernel/osrelease"),
            os_image: fs::read_to_string("/etc/os-release")
                .ok()
                .and_then(|text| os_image(&text))
                .unwrap_or_default(),
        }
    }
}

/// Whether the disk of the node's directory has little space left.
pub(super) fn is_disk_full(data_dir: &Path) -> bool {
    usage::space(data_dir).is_ok_and(|space| {
        let (available, total) = (space.available, space.total);
        available < LITTLE_SPACE && available < total / 10
    })
}

/// The processor as Kubernetes (that is, Go) names it.
pub(super) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "x86" => "386",
        "powerpc64" => "ppc64le",
        other => other,
    }
}

fn line(path: &str) -> String {
    fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default()
}

fn memory(meminfo: &str) -> Option<u64> {
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    total.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

fn os_image(os_release: &str) -> Option<String> {
    let name = os_release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="))?;
    Some(name.trim_matches('"').to_owned())
}

/// The address that others see of us; choosing a route sends nothing.
fn own_address() -> IpAddr {
    let routed = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).and_then(|socket| {
        socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9)).and_then(|()| socket.local_addr())
    });
    routed.map_or(IpAddr::V4(Ipv4Addr::LOCALHOST), |address| address.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_and_the_distributions_files_are_read() {
        assert_eq!(memory("MemTotal:       16315032 kB\nMemFree: 1 kB\n"), Some(16_315_032 * 1024));
        assert_eq!(memory("MemFree: 1 kB\n"), None);
        assert_eq!(os_image("ID=x\nPRETTY_NAME=\"A Linux 12\"\n").as_deref(), Some("A Linux 12"));
    }

    #[test]
    fn this_machine_has_all_of_it() {
        let facts = Facts::read(Path::new("/"), 110, None);
        assert!(facts.capacity.cpu_millis >= 1000 && facts.capacity.memory > facts.allocatable.memory);
        assert!(facts.allocatable.memory > 0 && facts.capacity.ephemeral_storage > 0);
        assert!(!facts.kernel.is_empty() && !facts.boot_id.is_empty());
    }
}
