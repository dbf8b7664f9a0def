//! Kubernetes' words for how a volume is used, in CSI's.
//!
//! Provisioner, attacher, resizer and node all describe the same claim or volume to the driver; they must say the same.

use crate::v1::VolumeCapability;
use crate::v1::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume, access_mode::Mode};

/// Why access modes have no equal in CSI.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AccessModes {
    /// The list of access modes is empty.
    #[error("no access mode is given; write at least one, such as ReadWriteOnce")]
    None,
    /// Not an access mode of Kubernetes.
    #[error(
        "unknown access mode {0:?}; it is one of ReadWriteOnce, ReadOnlyMany, ReadWriteMany, ReadWriteOncePod"
    )]
    Unknown(String),
    /// ReadWriteOncePod allows nobody else, so it cannot be combined.
    #[error("ReadWriteOncePod cannot be combined with other access modes")]
    NotAlone,
    /// One writer and many readers at once has no CSI mode that drivers implement.
    #[error("ReadWriteOnce and ReadOnlyMany cannot be combined; choose one, or ReadWriteMany")]
    WriterAndReaders,
}

/// How the data is seen.
#[derive(Debug, Clone, Copy)]
pub enum Access<'a> {
    /// As a raw device.
    Block,
    /// As a mounted filesystem.
    Mount {
        /// The filesystem; empty lets the driver choose.
        fs_type: &'a str,
        /// The mount options of the volume.
        flags: &'a [String],
        /// The group the files are given to at mount time.
        group: Option<&'a str>,
    },
}

/// The one CSI mode that stands for all of a volume's access modes.
///
/// `single_node_multi_writer` is the driver's capability of that name: without it CSI cannot distinguish one pod from many
/// pods on one node.
pub fn access_mode(modes: &[String], single_node_multi_writer: bool) -> Result<Mode, AccessModes> {
    let (mut many_writers, mut many_readers, mut one_node, mut one_pod) = (false, false, false, false);
    for mode in modes {
        match mode.as_str() {
            "ReadWriteMany" => many_writers = true,
            "ReadOnlyMany" => many_readers = true,
            "ReadWriteOnce" => one_node = true,
            "ReadWriteOncePod" => one_pod = true,
            other => return Err(AccessModes::Unknown(other.to_owned())),
        }
    }
    match (many_writers, many_readers, one_node, one_pod) {
        (false, false, false, true) if single_node_multi_writer => Ok(Mode::SingleNodeSingleWriter),
        (false, false, false, true) => Ok(Mode::SingleNodeWriter),
        (_, _, _, true) => Err(AccessModes::NotAlone),
        (true, ..) => Ok(Mode::MultiNodeMultiWriter),
        (_, true, true, _) => Err(AccessModes::WriterAndReaders),
        (_, true, ..) => Ok(Mode::MultiNodeReaderOnly),
        (_, _, true, _) if single_node_multi_writer => Ok(Mode::SingleNodeMultiWriter),
        (_, _, true, _) => Ok(Mode::SingleNodeWriter),
        (false, false, false, false) => Err(AccessModes::None),
    }
}

/// A mode and an access as one capability.
pub fn capability(mode: Mode, access: Access<'_>) -> VolumeCapability {
    let access_type = match access {
        Access::Block => AccessType::Block(BlockVolume {}),
        Access::Mount { fs_type, flags, group } => AccessType::Mount(MountVolume {
            fs_type: fs_type.to_owned(),
            mount_flags: flags.to_vec(),
            volume_mount_group: group.unwrap_or_default().to_owned(),
        }),
    };
    VolumeCapability { access_mode: Some(AccessMode { mode: mode.into() }), access_type: Some(access_type) }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Row<'a> = (&'a [&'a str], Result<Mode, AccessModes>, Result<Mode, AccessModes>);

    #[test]
    fn every_set_of_access_modes_has_the_mode_or_the_refusal_of_upstream() {
        let (rwo, rox, rwx, pod) = ("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod");
        let rows: &[Row<'_>] = &[
            (&[], Err(AccessModes::None), Err(AccessModes::None)),
            (&[rwo], Ok(Mode::SingleNodeWriter), Ok(Mode::SingleNodeMultiWriter)),
            (&[pod], Ok(Mode::SingleNodeWriter), Ok(Mode::SingleNodeSingleWriter)),
            (&[rox], Ok(Mode::MultiNodeReaderOnly), Ok(Mode::MultiNodeReaderOnly)),
            (&[rwx], Ok(Mode::MultiNodeMultiWriter), Ok(Mode::MultiNodeMultiWriter)),
            (&[rwo, rwx], Ok(Mode::MultiNodeMultiWriter), Ok(Mode::MultiNodeMultiWriter)),
            (&[rox, rwx], Ok(Mode::MultiNodeMultiWriter), Ok(Mode::MultiNodeMultiWriter)),
            (&[rox, rwo, rwx], Ok(Mode::MultiNodeMultiWriter), Ok(Mode::MultiNodeMultiWriter)),
            (&[rox, rwo], Err(AccessModes::WriterAndReaders), Err(AccessModes::WriterAndReaders)),
            (&[pod, rwo], Err(AccessModes::NotAlone), Err(AccessModes::NotAlone)),
            (&[pod, rox], Err(AccessModes::NotAlone), Err(AccessModes::NotAlone)),
            (&[rwx, pod], Err(AccessModes::NotAlone), Err(AccessModes::NotAlone)),
            (
                &["Often"],
                Err(AccessModes::Unknown("Often".into())),
                Err(AccessModes::Unknown("Often".into())),
            ),
        ];
        for (modes, without, with) in rows {
            let modes: Vec<String> = modes.iter().map(ToString::to_string).collect();
            assert_eq!(&access_mode(&modes, false), without, "{modes:?} without SINGLE_NODE_MULTI_WRITER");
            assert_eq!(&access_mode(&modes, true), with, "{modes:?} with SINGLE_NODE_MULTI_WRITER");
        }
    }

    #[test]
    fn a_capability_says_what_was_asked_for() {
        let flags = ["ro".to_owned()];
        let mounted = capability(
            Mode::SingleNodeWriter,
            Access::Mount { fs_type: "ext4", flags: &flags, group: Some("7") },
        );
        let Some(AccessType::Mount(mount)) = &mounted.access_type else { panic!("not a mount: {mounted:?}") };
        assert_eq!(
            (mount.fs_type.as_str(), mount.volume_mount_group.as_str(), mount.mount_flags.as_slice()),
            ("ext4", "7", flags.as_slice())
        );
        assert_eq!(mounted.access_mode.unwrap().mode(), Mode::SingleNodeWriter);
        let block = capability(Mode::MultiNodeMultiWriter, Access::Block);
        assert_eq!(block.access_type, Some(AccessType::Block(BlockVolume {})));
    }
}
