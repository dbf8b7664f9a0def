//! Gives a copied Btrfs an identity of its own, by its superblocks alone.
//!
//! The kernel tells filesystems apart by the `fsid` of the superblock, while every other block carries the one the
//! filesystem was made with. The feature METADATA_UUID lets the two differ. `btrfstune -m` sets it as well, but in
//! a transaction, which makes the log of a filesystem that was copied while in use unreadable.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read as _},
    os::unix::fs::FileExt as _,
    path::Path,
};

/// Where the copies of the superblock are; the first is the one a mount reads.
const COPIES: [u64; 3] = [64 << 10, 64 << 20, 256 << 30];
const SIZE: usize = 4096;

const CHECKSUM: usize = 0x20;
const FSID: usize = 0x20;
const MAGIC: usize = 0x40;
const INCOMPATIBLE: usize = 0xBC;
const CHECKSUM_TYPE: usize = 0xC4;
const METADATA_UUID: usize = 0x23B;
const UUID: usize = 16;

const HAS_METADATA_UUID: u64 = 1 << 10;

pub(super) fn renew(image: &Path) -> io::Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(image)?;
    let fsid = random_uuid()?;
    let mut is_primary = true;
    let mut renewed = Vec::new();
    for offset in COPIES {
        match read(&file, offset)? {
            Some(mut superblock) => {
                set_fsid(&mut superblock, fsid)?;
                renewed.push((superblock, offset));
            }
            None if is_primary => return Err(invalid("no btrfs superblock")),
            None => {}
        }
        is_primary = false;
    }
    // The first last: until then the filesystem is what it was.
    for (superblock, offset) in renewed.iter().rev() {
        file.write_all_at(superblock, *offset)?;
    }
    file.sync_all()
}

/// The identity of the filesystem as the kernel writes it; `None` if there is no btrfs.
pub(super) fn fsid(device: &Path) -> io::Result<Option<String>> {
    let superblock = read(&File::open(device)?, COPIES[0])?;
    Ok(superblock.map(|superblock| {
        let bytes = superblock[FSID..FSID + UUID].try_into().expect("sixteen bytes are sixteen bytes");
        let digits = format!("{:032x}", u128::from_be_bytes(bytes));
        [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]].join("-")
    }))
}

fn read(file: &File, offset: u64) -> io::Result<Option<[u8; SIZE]>> {
    let mut superblock = [0; SIZE];
    match file.read_exact_at(&mut superblock, offset) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    Ok(superblock[MAGIC..].starts_with(b"_BHRfS_M").then_some(superblock))
}

fn set_fsid(superblock: &mut [u8; SIZE], fsid: [u8; UUID]) -> io::Result<()> {
    if superblock[CHECKSUM_TYPE..CHECKSUM_TYPE + 2] != [0, 0] {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "a btrfs with other checksums than crc32c"));
    }
    if superblock[..4] != crc32c(&superblock[CHECKSUM..]).to_le_bytes() {
        return Err(invalid("the checksum of a btrfs superblock is wrong"));
    }
    let field = &mut superblock[INCOMPATIBLE..INCOMPATIBLE + 8];
    let features = u64::from_le_bytes((&*field).try_into().expect("eight bytes are eight bytes"));
    field.copy_from_slice(&(features | HAS_METADATA_UUID).to_le_bytes());
    if features & HAS_METADATA_UUID == 0 {
        superblock.copy_within(FSID..FSID + UUID, METADATA_UUID);
    }
    superblock[FSID..FSID + UUID].copy_from_slice(&fsid);
    let checksum = crc32c(&superblock[CHECKSUM..]);
    superblock[..4].copy_from_slice(&checksum.to_le_bytes());
    Ok(())
}

fn random_uuid() -> io::Result<[u8; UUID]> {
    let mut uuid = [0; UUID];
    File::open("/dev/urandom")?.read_exact(&mut uuid)?;
    // RFC 9562, version 4.
    uuid[6] = uuid[6] & 0x0F | 0x40;
    uuid[8] = uuid[8] & 0x3F | 0x80;
    Ok(uuid)
}

fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, byte| {
        (0..8)
            .fold(crc ^ u32::from(*byte), |crc: u32, _| crc >> 1 ^ if crc & 1 == 1 { 0x82F6_3B78 } else { 0 })
    })
}

fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc32c_gives_the_published_check_value() {
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
    }

    #[test]
    fn a_damaged_superblock_is_left_alone() {
        let mut superblock = [7; SIZE];
        superblock[CHECKSUM_TYPE..CHECKSUM_TYPE + 2].fill(0);
        let error = set_fsid(&mut superblock, [1; UUID]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert_eq!(superblock[FSID], 7);
    }
}
