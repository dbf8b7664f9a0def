//! Volume capabilities, from the wire and back.

use berth_core::{Access, AccessMode, VolumeCapability};
use berth_csi::v1::{
    self,
    volume_capability::{AccessMode as ModeMessage, AccessType, BlockVolume, MountVolume, access_mode::Mode},
};

use super::{Invalid, MAX_MAP, MAX_STRING, Parsed, missing};

/// A capability that has to be there.
pub(crate) fn capability(message: Option<v1::VolumeCapability>) -> Parsed<VolumeCapability> {
    parse("volume_capability", message.ok_or_else(|| missing("volume_capability"))?)
}

/// A capability that may be left out.
pub(super) fn optional(message: Option<v1::VolumeCapability>) -> Parsed<Option<VolumeCapability>> {
    message.map(|message| parse("volume_capability", message)).transpose()
}

/// At least one capability, all of one access kind.
pub(super) fn all(messages: Vec<v1::VolumeCapability>) -> Parsed<Vec<VolumeCapability>> {
    if messages.is_empty() {
        return Err(missing("volume_capabilities"));
    }
    any(messages)
}

/// Any number of capabilities, all of one access kind.
pub(super) fn any(messages: Vec<v1::VolumeCapability>) -> Parsed<Vec<VolumeCapability>> {
    let all: Vec<VolumeCapability> =
        messages.into_iter().map(|message| parse("volume_capabilities", message)).collect::<Parsed<_>>()?;
    if all.iter().any(|capability| capability.access.kind() != all[0].access.kind()) {
        return Err(Invalid::new(
            "volume_capabilities ask for block and for mount access; a volume can only have one of them",
        ));
    }
    Ok(all)
}

fn parse(field: &str, message: v1::VolumeCapability) -> Parsed<VolumeCapability> {
    let access = match message.access_type {
        None => return Err(Invalid(format!("{field}.access_type is missing; it has to be block or mount"))),
        Some(AccessType::Block(BlockVolume {})) => Access::Block,
        Some(AccessType::Mount(mount)) => mounted(field, mount)?,
    };
    let number = message.access_mode.ok_or_else(|| missing(&format!("{field}.access_mode")))?.mode;
    Ok(VolumeCapability { access, mode: mode(field, number)? })
}

fn mounted(field: &str, mount: MountVolume) -> Parsed<Access> {
    let fs_type = mount.fs_type;
    if fs_type.len() > MAX_STRING || fs_type.chars().any(char::is_control) {
        return Err(Invalid(format!("{field}.mount.fs_type is not the name of a filesystem")));
    }
    let size: usize = mount.mount_flags.iter().map(String::len).sum();
    if size > MAX_MAP {
        return Err(Invalid(format!("{field}.mount.mount_flags hold {size} bytes, the limit is {MAX_MAP}")));
    }
    if mount.mount_flags.iter().any(|flag| flag.contains('\0')) {
        return Err(Invalid(format!("{field}.mount.mount_flags hold a NUL character")));
    }
    Ok(Access::Mount { fs_type, flags: mount.mount_flags, group: group(field, &mount.volume_mount_group)? })
}

fn group(field: &str, text: &str) -> Parsed<Option<u32>> {
    if text.is_empty() {
        return Ok(None);
    }
    // The largest number means "leave it" to chown(2).
    let number = text.parse().ok().filter(|gid| *gid != u32::MAX && text.bytes().all(|b| b.is_ascii_digit()));
    match number {
        Some(gid) => Ok(Some(gid)),
        None => Err(Invalid(format!("{field}.mount.volume_mount_group {text:?} is not a numeric group id"))),
    }
}

fn mode(field: &str, number: i32) -> Parsed<AccessMode> {
    match Mode::try_from(number) {
        Ok(Mode::SingleNodeWriter) => Ok(AccessMode::SingleNodeWriter),
        Ok(Mode::SingleNodeReaderOnly) => Ok(AccessMode::SingleNodeReaderOnly),
        Ok(Mode::MultiNodeReaderOnly) => Ok(AccessMode::MultiNodeReaderOnly),
        Ok(Mode::MultiNodeSingleWriter) => Ok(AccessMode::MultiNodeSingleWriter),
        Ok(Mode::MultiNodeMultiWriter) => Ok(AccessMode::MultiNodeMultiWriter),
        Ok(Mode::SingleNodeSingleWriter) => Ok(AccessMode::SingleNodeSingleWriter),
        Ok(Mode::SingleNodeMultiWriter) => Ok(AccessMode::SingleNodeMultiWriter),
        Ok(Mode::Unknown) => Err(missing(&format!("{field}.access_mode.mode"))),
        Err(_) => Err(Invalid(format!("{field}.access_mode.mode {number} is not one this driver knows"))),
    }
}

/// The capability as it travels over CSI.
pub(crate) fn message_of(capability: &VolumeCapability) -> v1::VolumeCapability {
    let access = match &capability.access {
        Access::Block => AccessType::Block(BlockVolume {}),
        Access::Mount { fs_type, flags, group } => AccessType::Mount(MountVolume {
            fs_type: fs_type.clone(),
            mount_flags: flags.clone(),
            volume_mount_group: group.map(|gid| gid.to_string()).unwrap_or_default(),
        }),
    };
    let mode = match capability.mode {
        AccessMode::SingleNodeWriter => Mode::SingleNodeWriter,
        AccessMode::SingleNodeReaderOnly => Mode::SingleNodeReaderOnly,
        AccessMode::MultiNodeReaderOnly => Mode::MultiNodeReaderOnly,
        AccessMode::MultiNodeSingleWriter => Mode::MultiNodeSingleWriter,
        AccessMode::MultiNodeMultiWriter => Mode::MultiNodeMultiWriter,
        AccessMode::SingleNodeSingleWriter => Mode::SingleNodeSingleWriter,
        AccessMode::SingleNodeMultiWriter => Mode::SingleNodeMultiWriter,
    };
    v1::VolumeCapability { access_type: Some(access), access_mode: Some(ModeMessage { mode: mode.into() }) }
}
