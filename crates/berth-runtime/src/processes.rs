//! What containers take of the machine where no control group counts it: summed up over their processes, by `/proc`.

use std::{collections::HashMap, fs, path::Path};

use crate::cgroup::Usage;

/// The unit of processor time in `/proc`, in nanoseconds: Linux promises 100 to user space, whatever its own clock does.
pub const TICK: u64 = 10_000_000;

/// The pid namespace of a process, by its number.
pub(crate) fn namespace(pid: i32) -> Option<String> {
    let link = fs::read_link(format!("/proc/{pid}/ns/pid")).ok()?;
    link.into_os_string().into_string().ok()
}

/// What the processes of each pid namespace take. Processor time of those that have ended counts where their parent was told
/// of their end.
pub(crate) fn usage_by_namespace() -> HashMap<String, Usage> {
    let mut all: HashMap<String, Usage> = HashMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // Processes come and go.
        if let (Some(namespace), Some(usage)) = (namespace(pid), usage(&entry.path())) {
            *all.entry(namespace).or_default() += usage;
        }
    }
    all
}

fn usage(process: &Path) -> Option<Usage> {
    let read = |name: &str| fs::read_to_string(process.join(name)).ok();
    parse(&read("stat")?, &read("status")?)
}

/// Reads the times of a process from its `stat`, whose second field is a name in parentheses that may contain anything, and
/// its memory from its `status`.
fn parse(stat: &str, status: &str) -> Option<Usage> {
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
    let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
    // User and system time, of itself and of children that have ended.
    let time = number(14)? + number(15)? + number(16)? + number(17)?;
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    // The kernel's own processes have none.
    let resident = resident.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    let resident = resident.unwrap_or(0) * 1024;
    Some(Usage {
        cpu: time * TICK,
        memory: resident,
        working_set: resident,
        anonymous: resident,
        pids: number(20)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_line_about_a_process_is_read() {
        let line =
            "7 (a) b (c) S 1 7 7 0 -1 4194560 1 0 0 0 10 20 3 4 20 0 2 0 100 8192 5 18446744073709551615 1 1";
        let usage =
            Usage { cpu: 370_000_000, memory: 20_480, working_set: 20_480, anonymous: 20_480, pids: 2 };
        assert_eq!(parse(line, "Name:\ta\nVmRSS:\t      20 kB\n"), Some(usage));
        assert_eq!(parse(line, "Name:\ta\n").map(|usage| usage.memory), Some(0));
        assert_eq!(parse("7 (a) S", ""), None);
    }

    #[test]
    fn this_process_is_counted_in_its_namespace() {
        let own = namespace(i32::try_from(std::process::id()).unwrap()).unwrap();
        assert!(usage_by_namespace()[&own].memory > 0);
    }
}
