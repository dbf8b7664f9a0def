//! The handles that clients get: signed, so that nobody can make one up.
//!
//! | bytes | what |
//! |---|---|
//! | 0 | the form, 1 |
//! | 1 | how the file is found: 1 by the kernel's handle, 2 by a search |
//! | 2 | the kernel's type of the handle |
//! | 3 | 0 |
//! | 4 to 15 | the signature of all other bytes |
//! | 16 to at most 63 | the kernel's handle, or the file's number, filesystem and time of creation |

use berth_host::file_handle::FileHandle;
use berth_nfs::v3::wire::LONGEST_HANDLE;
use ring::hmac;

use crate::status::{Result, Status};

const FORM: u8 = 1;
const BY_KERNEL: u8 = 1;
const BY_SEARCH: u8 = 2;
const SIGNATURE: std::ops::Range<usize> = 4..16;
const HEAD: usize = 16;

/// What a handle names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Named {
    /// The file that the kernel has given this name.
    ByKernel(FileHandle),
    /// The file that is found by a search.
    BySearch(Identity),
}

/// A file without a handle of the kernel's: no other file of its filesystem has the same number and was created at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Identity {
    pub(crate) inode: u64,
    pub(crate) device: (u32, u32),
    /// When it was created, in nanoseconds, or 0 if the filesystem does not know.
    pub(crate) created: u64,
}

/// Writes a handle. A filesystem whose handles are too long for version 3 is served by search, so there is room.
pub(crate) fn write(key: &hmac::Key, named: &Named) -> Result<Vec<u8>> {
    let mut handle = vec![0; HEAD];
    handle[0] = FORM;
    match named {
        Named::ByKernel(kernel) => {
            handle[1] = BY_KERNEL;
            handle[2] = u8::try_from(kernel.kind).map_err(|_| Status::ServerFault)?;
            handle.extend_from_slice(&kernel.bytes);
        }
        Named::BySearch(of) => {
            handle[1] = BY_SEARCH;
            handle.extend_from_slice(&of.inode.to_be_bytes());
            handle.extend_from_slice(&of.device.0.to_be_bytes());
            handle.extend_from_slice(&of.device.1.to_be_bytes());
            handle.extend_from_slice(&of.created.to_be_bytes());
        }
    }
    if handle.len() > LONGEST_HANDLE {
        return Err(Status::ServerFault);
    }
    let signed = sign(key, &handle);
    handle[SIGNATURE].copy_from_slice(&signed[..SIGNATURE.len()]);
    Ok(handle)
}

/// Reads a handle that a client has sent: one that is no handle of ours is refused before anything looks at it.
pub(crate) fn read(key: &hmac::Key, handle: &[u8]) -> Result<Named> {
    if handle.len() < HEAD || handle[0] != FORM || handle[3] != 0 {
        return Err(Status::BadHandle);
    }
    let mut unsigned = handle.to_vec();
    unsigned[SIGNATURE].fill(0);
    let signed = sign(key, &unsigned);
    let pairs = signed.iter().zip(&handle[SIGNATURE]);
    // All bytes are compared, so that the time it takes says nothing.
    if pairs.fold(0, |differ, (ours, theirs)| differ | (ours ^ theirs)) != 0 {
        // It may also be a handle of a server that had another key.
        return Err(Status::Stale);
    }
    let body = &handle[HEAD..];
    match handle[1] {
        BY_KERNEL => Ok(Named::ByKernel(FileHandle { kind: handle[2].into(), bytes: body.to_vec() })),
        BY_SEARCH => {
            let bytes: &[u8; 24] = body.try_into().map_err(|_| Status::BadHandle)?;
            let number = |at: usize| {
                bytes[at..at + 4].iter().fold(0_u32, |number, byte| number << 8 | u32::from(*byte))
            };
            let long = |at: usize| u64::from(number(at)) << 32 | u64::from(number(at + 4));
            let device = (number(8), number(12));
            Ok(Named::BySearch(Identity { inode: long(0), device, created: long(16) }))
        }
        _ => Err(Status::BadHandle),
    }
}

fn sign(key: &hmac::Key, handle: &[u8]) -> [u8; 12] {
    let mut signature = [0; 12];
    signature.copy_from_slice(&hmac::sign(key, handle).as_ref()[..12]);
    signature
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(of: u8) -> hmac::Key {
        hmac::Key::new(hmac::HMAC_SHA256, &[of; 32])
    }

    fn both() -> [Named; 2] {
        let device = (8, 1);
        [
            Named::ByKernel(FileHandle { kind: 0x81, bytes: vec![1, 2, 3] }),
            Named::BySearch(Identity { inode: 1 << 40, device, created: u64::MAX - 1 }),
        ]
    }

    #[test]
    fn what_was_written_is_read() {
        for named in both() {
            let handle = write(&key(1), &named).unwrap();
            assert!(handle.len() <= LONGEST_HANDLE);
            assert_eq!(read(&key(1), &handle), Ok(named));
        }
    }

    #[test]
    fn no_handle_can_be_made_up() {
        for named in both() {
            let handle = write(&key(1), &named).unwrap();
            assert_eq!(read(&key(2), &handle), Err(Status::Stale));
            for at in 0..handle.len() {
                for bit in 0..8 {
                    let mut bent = handle.clone();
                    bent[at] ^= 1 << bit;
                    assert!(read(&key(1), &bent).is_err(), "bit {bit} of byte {at}");
                }
                assert!(read(&key(1), &handle[..at]).is_err(), "{at} bytes");
            }
            let longer = [&handle[..], &[0]].concat();
            assert!(read(&key(1), &longer).is_err());
        }
        assert!(read(&key(1), &[]).is_err());
        let too_long = Named::ByKernel(FileHandle { kind: 1, bytes: vec![0; 49] });
        assert_eq!(write(&key(1), &too_long), Err(Status::ServerFault));
    }
}
