//! The form of calls and answers, and who we say we are.

use crate::{
    status::{Fault, Refusal},
    xdr::{Decoder, Encoder},
};

const CALL: u32 = 0;
pub(super) const REPLY: u32 = 1;
const RPC_VERSION: u32 = 2;
const AUTH_SYS: u32 = 1;
/// What a server may add to prove itself; ours prove nothing.
const LONGEST_VERIFIER: usize = 400;

/// Who we say we are: AUTH_SYS, taken at our word by servers that trust our address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Credential {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) groups: Groups,
}

/// Further groups: AUTH_SYS has room for sixteen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Groups {
    numbers: [u32; Self::MOST],
    count: usize,
}

impl Groups {
    const MOST: usize = 16;

    /// The first of these.
    pub(crate) fn new(groups: &[u32]) -> Self {
        let count = groups.len().min(Self::MOST);
        let mut numbers = [0; Self::MOST];
        numbers[..count].copy_from_slice(&groups[..count]);
        Self { numbers, count }
    }

    fn as_slice(&self) -> &[u32] {
        &self.numbers[..self.count]
    }
}

/// A procedure of a service.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Procedure {
    pub(crate) program: u32,
    pub(crate) version: u32,
    pub(crate) number: u32,
}

pub(super) fn request(xid: u32, procedure: Procedure, credential: Credential, arguments: Encoder) -> Encoder {
    let mut message = Encoder::default();
    message.u32(xid).u32(CALL).u32(RPC_VERSION);
    message.u32(procedure.program).u32(procedure.version).u32(procedure.number);
    let mut body = Encoder::default();
    let groups = credential.groups.as_slice();
    body.u32(0).opaque(b"berth").u32(credential.uid).u32(credential.gid).length(groups.len());
    for group in groups {
        body.u32(*group);
    }
    message.u32(AUTH_SYS).length(body.len()).append(body);
    message.u32(0).u32(0);
    message.append(arguments);
    message
}

/// Reads an answer up to its results; the xid was read before.
pub(super) fn results(mut answer: Decoder) -> Result<Decoder, Fault> {
    if answer.u32()? != REPLY {
        return Err(Fault::Malformed("it is no answer"));
    }
    let accepted = match answer.u32()? {
        0 => true,
        1 => false,
        _ => return Err(Fault::Malformed("it is neither accepted nor denied")),
    };
    if !accepted {
        return Err(Fault::Refused(match answer.u32()? {
            0 => Refusal::Version,
            1 => Refusal::Authentication(answer.u32()?),
            _ => return Err(Fault::Malformed("it is denied for no known reason")),
        }));
    }
    answer.u32()?;
    answer.opaque(LONGEST_VERIFIER)?;
    Err(Fault::Refused(match answer.u32()? {
        0 => return Ok(answer),
        1 => Refusal::Program,
        2 => Refusal::Version,
        3 => Refusal::Procedure,
        4 => Refusal::Arguments,
        5 => Refusal::System,
        _ => return Err(Fault::Malformed("it is refused for no known reason")),
    }))
}
