//! MOUNT (RFC 1813, appendix I): how a client gets its first handle.

use std::path::{Component, Path, PathBuf};

use berth_nfs::xdr::{Decoder, Encoder};

use crate::{
    export::{Export, Object},
    service::{Outcome, end},
    status::{Result, Status},
};

const NULL: u32 = 0;
const MNT: u32 = 1;
const DUMP: u32 = 2;
const UMNT: u32 = 3;
const UMNTALL: u32 = 4;
const EXPORT: u32 = 5;
const LONGEST_PATH: usize = 1024;
const AUTH_SYS: u32 = 1;

/// What clients may call the directory, and who may.
#[derive(Debug, Clone)]
pub(crate) struct Names {
    /// Absolute paths; the first is its own on this machine.
    pub(crate) paths: Vec<PathBuf>,
    /// Networks, as EXPORT shows them.
    pub(crate) clients: Vec<String>,
}

impl Names {
    /// Where below the directory a client's path leads, if it is one of its names or lies below one.
    fn below(&self, path: &Path) -> Option<PathBuf> {
        let below = self.paths.iter().find_map(|name| path.strip_prefix(name).ok())?;
        Some(if below.as_os_str().is_empty() { PathBuf::from(".") } else { below.to_owned() })
    }
}

pub(crate) fn dispatch(
    export: &Export,
    names: &Names,
    is_trusted: bool,
    number: u32,
    from: &mut Decoder,
) -> Option<Outcome> {
    Some(match number {
        // Who has mounted it is not remembered, so that nothing is to be forgotten.
        NULL | UMNTALL => end(from).map(|()| Encoder::default()),
        UMNT => from.opaque(LONGEST_PATH).and_then(|_| end(from)).map(|()| Encoder::default()),
        DUMP => end(from).map(|()| {
            let mut to = Encoder::default();
            to.bool(false);
            to
        }),
        MNT => mount(export, names, is_trusted, from),
        EXPORT => end(from).map(|()| exports(names)),
        _ => return None,
    })
}

fn mount(export: &Export, names: &Names, is_trusted: bool, from: &mut Decoder) -> Outcome {
    let path = from.opaque(LONGEST_PATH)?;
    end(from)?;
    let find = || -> Result<Object> {
        if !is_trusted {
            return Err(Status::Access);
        }
        let path = std::str::from_utf8(&path).map_err(|_| Status::NoEntry)?;
        let path = Path::new(path);
        let is_plain =
            path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
        let below = if is_plain && !path.as_os_str().is_empty() { names.below(path) } else { None };
        export.locate(&below.ok_or(Status::Access)?)
    };
    let found = find().and_then(|found| export.handle(&found));
    if let Err(status) = found {
        tracing::info!("refused to let a client mount {}: {status:?}", String::from_utf8_lossy(&path));
    }
    let mut to = Encoder::default();
    match found {
        Ok(handle) => to.u32(0).opaque(&handle).u32(1).u32(AUTH_SYS),
        Err(status @ (Status::NoEntry | Status::Access | Status::NotDirectory | Status::NameTooLong)) => {
            to.u32(status.number())
        }
        // A symbolic link on the way is not followed.
        Err(Status::Invalid | Status::CrossDevice) => to.u32(Status::Access.number()),
        Err(_) => to.u32(Status::ServerFault.number()),
    };
    Ok(to)
}

fn exports(names: &Names) -> Encoder {
    let mut to = Encoder::default();
    for path in &names.paths {
        to.bool(true).opaque(path.as_os_str().as_encoded_bytes());
        for client in &names.clients {
            to.bool(true).opaque(client.as_bytes());
        }
        to.bool(false);
    }
    to.bool(false);
    to
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_a_name_of_the_directory_or_lies_below_one() {
        let names = Names { paths: vec!["/srv/data".into(), "/export".into()], clients: Vec::new() };
        for (path, below) in [
            ("/srv/data", Some(".")),
            ("/srv/data/", Some(".")),
            ("/export", Some(".")),
            ("/export//a/b", Some("a/b")),
            ("/srv/data/a", Some("a")),
            ("/srv", None),
            ("/", None),
            ("/exporting", None),
            ("export", None),
        ] {
            assert_eq!(names.below(Path::new(path)), below.map(PathBuf::from), "{path}");
        }
    }
}
