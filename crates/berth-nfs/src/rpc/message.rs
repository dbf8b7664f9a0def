//! The form of calls and answers, and who a client says it is: written and read, for the client and for a server.

use bytes::Bytes;

use crate::{
    status::{Fault, Refusal},
    xdr::{Decoder, Encoder, Malformed},
};

const CALL: u32 = 0;
pub(super) const REPLY: u32 = 1;
const RPC_VERSION: u32 = 2;
const AUTH_NONE: u32 = 0;
const AUTH_SYS: u32 = 1;
/// `auth_stat`: the credential cannot be read, or is of a kind that is not spoken.
const BAD_CREDENTIAL: u32 = 1;
/// A machine's name in a credential, and a credential as a whole.
const LONGEST_MACHINE_NAME: usize = 255;
const LONGEST_CREDENTIAL: usize = 400;
/// What a server may add to prove itself; ours prove nothing.
const LONGEST_VERIFIER: usize = 400;

/// Who a client says it is: AUTH_SYS, taken at its word by servers that trust its address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Credential {
    /// The id of the user.
    pub uid: u32,
    /// The user's first group.
    pub gid: u32,
    /// Groups that the user is in besides.
    pub groups: Groups,
}

/// Further groups: AUTH_SYS has room for sixteen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Groups {
    numbers: [u32; Self::MOST],
    count: usize,
}

impl Groups {
    const MOST: usize = 16;

    /// The first of these.
    pub fn new(groups: &[u32]) -> Self {
        let count = groups.len().min(Self::MOST);
        let mut numbers = [0; Self::MOST];
        numbers[..count].copy_from_slice(&groups[..count]);
        Self { numbers, count }
    }

    /// The groups, as they came.
    pub fn as_slice(&self) -> &[u32] {
        &self.numbers[..self.count]
    }
}

/// A procedure of a service.
#[derive(Debug, Clone, Copy)]
pub struct Procedure {
    /// The number of the service.
    pub program: u32,
    /// The version of the service.
    pub version: u32,
    /// The number of the procedure in it.
    pub number: u32,
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

/// A call, as a server reads it.
#[derive(Debug)]
pub struct Call {
    /// The client's number for it.
    pub xid: u32,
    /// The procedure that is called.
    pub procedure: Procedure,
    /// Who calls; `None` for AUTH_NONE.
    pub credential: Option<Credential>,
    /// What follows, up to the procedure.
    pub arguments: Decoder,
}

/// A record that is no call.
#[derive(Debug)]
pub enum Unreadable {
    /// It makes no sense, and has no answer.
    Nonsense,
    /// It is a call that is refused by this message.
    Refused(Encoder),
}

impl Call {
    /// Reads a record that a client sent.
    pub fn read(record: Bytes) -> Result<Self, Unreadable> {
        let mut from = Decoder::new(record);
        let nonsense = |_: Malformed| Unreadable::Nonsense;
        let xid = from.u32().map_err(nonsense)?;
        if from.u32().map_err(nonsense)? != CALL {
            return Err(Unreadable::Nonsense);
        }
        if from.u32().map_err(nonsense)? != RPC_VERSION {
            let mut message = Encoder::default();
            message.u32(xid).u32(REPLY).u32(1).u32(0).u32(RPC_VERSION).u32(RPC_VERSION);
            return Err(Unreadable::Refused(message));
        }
        let garbage = |_: Malformed| Unreadable::Refused(refused(xid, Refusal::Arguments));
        let (program, version) = (from.u32().map_err(garbage)?, from.u32().map_err(garbage)?);
        let procedure = Procedure { program, version, number: from.u32().map_err(garbage)? };
        let flavor = from.u32().map_err(garbage)?;
        let body = from.opaque(LONGEST_CREDENTIAL).map_err(garbage)?;
        from.u32().map_err(garbage)?;
        from.opaque(LONGEST_VERIFIER).map_err(garbage)?;
        let bad = |_| Unreadable::Refused(refused(xid, Refusal::Authentication(BAD_CREDENTIAL)));
        let credential = match flavor {
            AUTH_NONE => None,
            AUTH_SYS => Some(Credential::read(body).map_err(bad)?),
            _ => return Err(bad(Malformed("the kind of credential is not spoken"))),
        };
        Ok(Self { xid, procedure, credential, arguments: from })
    }
}

impl Credential {
    fn read(body: Bytes) -> Result<Self, Malformed> {
        let mut from = Decoder::new(body);
        from.u32()?;
        from.opaque(LONGEST_MACHINE_NAME)?;
        let (uid, gid) = (from.u32()?, from.u32()?);
        let count = from.count(4)?;
        if count > Groups::MOST {
            return Err(Malformed("a user has more than sixteen groups"));
        }
        let groups = (0..count).map(|_| from.u32()).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { uid, gid, groups: Groups::new(&groups) })
    }
}

/// The beginning of an answer; the results follow.
pub fn accepted(xid: u32) -> Encoder {
    let mut message = Encoder::default();
    message.u32(xid).u32(REPLY).u32(0).u32(AUTH_NONE).u32(0).u32(0);
    message
}

/// An answer without results. A service of ours that is not spoken in a version is spoken in version 3 only.
pub fn refused(xid: u32, refusal: Refusal) -> Encoder {
    let mut message = Encoder::default();
    message.u32(xid).u32(REPLY);
    if let Refusal::Authentication(reason) = refusal {
        message.u32(1).u32(1).u32(reason);
        return message;
    }
    message.u32(0).u32(AUTH_NONE).u32(0);
    match refusal {
        Refusal::Program => message.u32(1),
        Refusal::Version => message.u32(2).u32(3).u32(3),
        Refusal::Procedure => message.u32(3),
        Refusal::Arguments => message.u32(4),
        Refusal::System | Refusal::Authentication(_) => message.u32(5),
    };
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOKUP: Procedure = Procedure { program: 100_003, version: 3, number: 3 };

    fn call() -> Bytes {
        let credential = Credential { uid: 7, gid: 8, groups: Groups::new(&[9, 10]) };
        let mut arguments = Encoder::default();
        arguments.opaque(b"name");
        request(42, LOOKUP, credential, arguments).finish().concat().into()
    }

    #[test]
    fn a_server_reads_what_a_client_writes() {
        let mut read = Call::read(call()).unwrap();
        assert_eq!((read.xid, read.procedure.program, read.procedure.number), (42, 100_003, 3));
        let credential = read.credential.unwrap();
        assert_eq!((credential.uid, credential.gid, credential.groups.as_slice()), (7, 8, &[9, 10][..]));
        assert_eq!(read.arguments.opaque(10).unwrap(), "name");
        let answer = |message: Encoder| {
            let mut answer = Decoder::new(message.finish().concat().into());
            assert_eq!(answer.u32(), Ok(42));
            results(answer)
        };
        assert!(answer(accepted(42)).is_ok());
        for refusal in [
            Refusal::Program,
            Refusal::Version,
            Refusal::Procedure,
            Refusal::Arguments,
            Refusal::System,
            Refusal::Authentication(5),
        ] {
            assert!(matches!(answer(refused(42, refusal)), Err(Fault::Refused(read)) if read == refusal));
        }
    }

    #[test]
    fn a_call_that_is_cut_or_bent_is_refused() {
        let whole = call();
        for length in 0..whole.len() - 8 {
            match Call::read(whole.slice(..length)) {
                Err(Unreadable::Nonsense) => assert!(length < 12, "{length}"),
                Err(Unreadable::Refused(_)) => assert!(length >= 12, "{length}"),
                Ok(_) => panic!("{length} bytes are no call"),
            }
        }
        let bent = |at: usize, word: u32| {
            let mut bytes = whole.to_vec();
            bytes[at..at + 4].copy_from_slice(&word.to_be_bytes());
            Call::read(bytes.into())
        };
        // It is an answer; RPC has another version; the credential is of another kind, or longer than allowed, or names
        // more groups than there are or may be.
        assert!(matches!(bent(4, REPLY), Err(Unreadable::Nonsense)));
        for (at, word) in [(8, 3), (24, 6), (28, 4000), (28, u32::MAX), (56, 3), (56, u32::MAX), (36, 300)] {
            assert!(matches!(bent(at, word), Err(Unreadable::Refused(_))), "{word} at {at}");
        }
    }
}
