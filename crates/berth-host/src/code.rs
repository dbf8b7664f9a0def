//! The program's own code in memory.
//!
//! The kernel maps a program's file in large pieces around each page that is run, and never unmaps one: after its start
//! a process that runs two megabytes of code is charged with twenty. What is unmapped and needed again comes back from
//! the page cache in a microsecond.
#![expect(unsafe_code, reason = "mappings are changed by a system call on addresses")]

use std::{fs, io};

use rustix::mm::{Advice, madvise};

/// Unmaps all code of this program; what runs is mapped again as it runs.
///
/// # Errors
/// If the mappings cannot be read or changed; nothing depends on it.
pub fn unmap_idle() -> io::Result<()> {
    let program = fs::read_link("/proc/self/exe")?;
    let Some(program) = program.to_str() else { return Ok(()) };
    for line in fs::read_to_string("/proc/self/maps")?.lines() {
        let Some((start, length)) = code(line, program) else { continue };
        // SAFETY: the range is a private mapping of a file that is executable and not writable, so its pages are what
        // the file holds, before and after.
        unsafe { madvise(std::ptr::with_exposed_provenance_mut(start), length, Advice::LinuxDontNeed)? };
    }
    Ok(())
}

/// Where a line of `/proc/self/maps` says that code of the program lies: start and length.
fn code(line: &str, program: &str) -> Option<(usize, usize)> {
    let mut fields = line.splitn(6, ' ');
    let (range, rights) = (fields.next()?, fields.next()?);
    // Never what is only readable: relocated data, which no file holds, is that too.
    if rights != "r-xp" || fields.nth(3)?.trim_start() != program {
        return None;
    }
    let (start, end) = range.split_once('-')?;
    let (start, end) = (usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?);
    Some((start, end.checked_sub(start)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_executable_mappings_of_the_program_are_code() {
        let line = "55f0a000-55f0c000 r-xp 00001000 fe:00 77       /usr/bin/berth";
        assert_eq!(code(line, "/usr/bin/berth"), Some((0x55f0_a000, 0x2000)));
        assert_eq!(code(line, "/usr/bin/other"), None);
        assert_eq!(
            code(&line.replace("r-xp", "r--p"), "/usr/bin/berth"),
            None,
            "relocated data looks like this"
        );
        assert_eq!(code(&line.replace("r-xp", "rwxp"), "/usr/bin/berth"), None);
        assert_eq!(code("7ffd1000-7ffd3000 r-xp 00000000 00:00 0    [vdso]", "/usr/bin/berth"), None);
        assert_eq!(code("", "/usr/bin/berth"), None);
    }

    #[test]
    fn a_program_runs_on_with_less_of_it_in_memory() {
        let resident = || {
            let status = fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("RssFile:")).unwrap().to_owned();
            line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
        };
        let shrinks = || {
            let before = resident();
            unmap_idle().unwrap();
            resident() <= before
        };
        // Another test may need more of it just then.
        assert!((0..100).any(|_| shrinks()));
        assert_eq!(format!("{:>5}", 7 * 6), "   42");
    }
}
