//! What the kernel lets this process use.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::error::{Error, Result};

/// Raises the limit of open files to as much as is allowed without asking anybody; it is inherited by children.
pub fn raise_open_files() -> Result<()> {
    let limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return Ok(());
    }
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })
        .map_err(|errno| Error::new("raise the limit of open files", errno))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_files_can_be_opened_as_are_allowed_at_most() {
        let before = getrlimit(Resource::Nofile);
        let lower = before.maximum.map(|most| most / 2);
        setrlimit(Resource::Nofile, Rlimit { current: lower, ..before }).unwrap();
        for _ in 0..2 {
            raise_open_files().unwrap();
            assert_eq!(getrlimit(Resource::Nofile).current, before.maximum);
        }
        setrlimit(Resource::Nofile, before).unwrap();
    }
}
