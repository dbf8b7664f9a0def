//! Questions and answers of DNS as bytes: what RFC 1035 has of them, with the size that RFC 6891 lets a client name.

use std::net::Ipv4Addr;

/// The largest message over UDP of a client that does not say, and of one that does.
const SMALL: usize = 512;
const LARGE: usize = 4096;
const HEADER: usize = 12;
const LONGEST_NAME: usize = 255;
const LONGEST_LABEL: usize = 63;
/// A name that is the question's.
const SAME_NAME: u16 = 0xC00C;
const RESPONSE: u16 = 0x8000;
const AUTHORITATIVE: u16 = 0x0400;
const TRUNCATED: u16 = 0x0200;
const RECURSION_DESIRED: u16 = 0x0100;
const RECURSION_AVAILABLE: u16 = 0x0080;
const INTERNET: u16 = 1;
const ANY_CLASS: u16 = 255;
const OPTIONS: u16 = 41;

pub(crate) const A: u16 = 1;
pub(crate) const CNAME: u16 = 5;
pub(crate) const SOA: u16 = 6;
pub(crate) const PTR: u16 = 12;
pub(crate) const TXT: u16 = 16;
pub(crate) const AAAA: u16 = 28;
pub(crate) const SRV: u16 = 33;
pub(crate) const ANY: u16 = 255;

/// How an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Code {
    Fine = 0,
    Malformed = 1,
    Failed = 2,
    NoSuchName = 3,
    NotDone = 4,
    Refused = 5,
}

/// What a client asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Question {
    pub(crate) id: u16,
    flags: u16,
    /// The labels of the name, in small letters.
    pub(crate) labels: Vec<String>,
    pub(crate) kind: u16,
    /// The question as it was asked, with the letters of the client.
    raw: Vec<u8>,
    /// How large an answer over UDP may be; `None` if the client has not said.
    size: Option<usize>,
}

/// What a record says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Data {
    Address(Ipv4Addr),
    Alias(String),
    Pointer(String),
    Service {
        port: u16,
        target: String,
    },
    Text(String),
    /// Whose authority the zone is: what answers that say no carry, so that they can be kept for a while.
    Authority(String),
}

/// A record; without a name, that of the question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) name: Option<String>,
    pub(crate) data: Data,
}

impl Record {
    pub(crate) fn new(data: Data) -> Self {
        Self { name: None, data }
    }

    pub(crate) fn of(name: impl Into<String>, data: Data) -> Self {
        Self { name: Some(name.into()), data }
    }
}

/// An answer before it is written.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Sections {
    pub(crate) answers: Vec<Record>,
    pub(crate) authority: Vec<Record>,
    pub(crate) additional: Vec<Record>,
    /// Records that somebody else wrote, whole, behind the answers, and how many.
    pub(crate) raw: (u16, Vec<u8>),
}

/// How long records may be kept, in seconds.
const KEPT: u32 = 5;

impl Question {
    /// Reads a question; the error is the answer to give instead, if any can be given.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, Option<Vec<u8>>> {
        let number = |at: usize| Some(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]));
        let (Some(id), Some(flags), true) = (number(0), number(2), bytes.len() >= HEADER) else {
            return Err(None);
        };
        // An answer is answered by nobody, or two resolvers would talk for ever.
        if flags & RESPONSE != 0 {
            return Err(None);
        }
        let refuse = |code: Code| {
            let flags = RESPONSE | flags & (0x7800 | RECURSION_DESIRED) | code as u16;
            Err(Some([id, flags, 0, 0, 0, 0].iter().flat_map(|number| number.to_be_bytes()).collect()))
        };
        if flags & 0x7800 != 0 {
            return refuse(Code::NotDone);
        }
        if number(4) != Some(1) {
            return refuse(Code::Malformed);
        }
        let Some((labels, end)) = labels(bytes, HEADER) else { return refuse(Code::Malformed) };
        let (Some(kind), Some(class)) = (number(end), number(end + 2)) else {
            return refuse(Code::Malformed);
        };
        if class != INTERNET && class != ANY_CLASS {
            return refuse(Code::Refused);
        }
        let raw = bytes.get(HEADER..end + 4).unwrap_or_default().to_vec();
        let more = u32::from(number(6).unwrap_or(0)) + u32::from(number(8).unwrap_or(0));
        let size = if more == 0 { options(bytes, end + 4, number(10).unwrap_or(0)) } else { None };
        Ok(Self { id, flags, labels, kind, raw, size })
    }

    /// The name, without the dot at its end.
    pub(crate) fn name(&self) -> String {
        self.labels.join(".")
    }

    /// The bytes of an answer; over UDP without the records that do not fit, which it says.
    pub(crate) fn answer(&self, code: Code, authoritative: bool, sections: &Sections, udp: bool) -> Vec<u8> {
        let limit = match self.size {
            _ if !udp => usize::from(u16::MAX),
            Some(size) => size.clamp(SMALL, LARGE),
            None => SMALL,
        };
        let whole = self.write(code, authoritative, sections, 0);
        if whole.len() <= limit {
            return whole;
        }
        self.write(code, authoritative, &Sections::default(), TRUNCATED)
    }

    fn write(&self, code: Code, authoritative: bool, sections: &Sections, more: u16) -> Vec<u8> {
        let own = if authoritative { AUTHORITATIVE } else { 0 };
        let flags =
            RESPONSE | RECURSION_AVAILABLE | own | more | self.flags & RECURSION_DESIRED | code as u16;
        let count = |records: &[Record]| u16::try_from(records.len()).unwrap_or(u16::MAX);
        let options = u16::from(self.size.is_some());
        let counts = [
            self.id,
            flags,
            1,
            count(&sections.answers).saturating_add(sections.raw.0),
            count(&sections.authority),
            count(&sections.additional) + options,
        ];
        let mut bytes: Vec<u8> = counts.iter().flat_map(|number| number.to_be_bytes()).collect();
        bytes.extend_from_slice(&self.raw);
        sections.answers.iter().for_each(|record| record.write(&mut bytes));
        bytes.extend_from_slice(&sections.raw.1);
        sections.authority.iter().chain(&sections.additional).for_each(|record| record.write(&mut bytes));
        if options == 1 {
            bytes.push(0);
            for number in [OPTIONS, u16::try_from(LARGE).unwrap_or(u16::MAX), 0, 0, 0] {
                bytes.extend_from_slice(&number.to_be_bytes());
            }
        }
        bytes
    }
}

impl Record {
    fn write(&self, bytes: &mut Vec<u8>) {
        match &self.name {
            None => bytes.extend_from_slice(&SAME_NAME.to_be_bytes()),
            Some(name) => write_name(bytes, name),
        }
        let (kind, data) = match &self.data {
            Data::Address(address) => (A, address.octets().to_vec()),
            Data::Alias(name) => (CNAME, named(name)),
            Data::Pointer(name) => (PTR, named(name)),
            Data::Text(text) => {
                let text = &text.as_bytes()[..text.len().min(255)];
                (
                    TXT,
                    std::iter::once(u8::try_from(text.len()).unwrap_or(0))
                        .chain(text.iter().copied())
                        .collect(),
                )
            }
            Data::Service { port, target } => {
                let mut data: Vec<u8> =
                    [0, 100, *port].iter().flat_map(|number| number.to_be_bytes()).collect();
                write_name(&mut data, target);
                (SRV, data)
            }
            Data::Authority(zone) => {
                let mut data = named(&format!("ns.dns.{zone}"));
                write_name(&mut data, &format!("hostmaster.{zone}"));
                let numbers: [u32; 5] = [1, 7200, 1800, 86400, KEPT];
                data.extend(numbers.iter().flat_map(|number| number.to_be_bytes()));
                (SOA, data)
            }
        };
        bytes.extend_from_slice(&kind.to_be_bytes());
        bytes.extend_from_slice(&INTERNET.to_be_bytes());
        bytes.extend_from_slice(&KEPT.to_be_bytes());
        bytes.extend_from_slice(&u16::try_from(data.len()).unwrap_or(0).to_be_bytes());
        bytes.extend_from_slice(&data);
    }
}

/// A question about a name, as it is sent to another resolver.
pub(crate) fn ask(id: u16, name: &str, kind: u16) -> Vec<u8> {
    let mut bytes: Vec<u8> =
        [id, RECURSION_DESIRED, 1, 0, 0, 0].iter().flat_map(|number| number.to_be_bytes()).collect();
    write_name(&mut bytes, name);
    bytes.extend_from_slice(&kind.to_be_bytes());
    bytes.extend_from_slice(&INTERNET.to_be_bytes());
    bytes
}

/// Whether somebody else's answer was cut, because it was too large for a datagram.
pub(crate) fn is_truncated(answer: &[u8]) -> bool {
    answer.get(2..4).is_some_and(|flags| u16::from_be_bytes([flags[0], flags[1]]) & TRUNCATED != 0)
}

/// Whether somebody else's answer says that he cannot or will not say (SERVFAIL, NOTIMP, REFUSED), so that another may.
pub(crate) fn is_refused(answer: &[u8]) -> bool {
    let codes = [Code::Failed, Code::NotDone, Code::Refused].map(|code| code as u8);
    answer.get(3).is_some_and(|flags| codes.contains(&(flags & 15)))
}

/// The addresses (`kind` is A or AAAA: records that hold names cannot be copied) for an alias's target in somebody else's
/// answer, under the name of the target: how many, and their bytes.
pub(crate) fn copied(answer: &[u8], target: &str, kind: u16) -> (u16, Vec<u8>) {
    let number = |at: usize| Some(u16::from_be_bytes([*answer.get(at)?, *answer.get(at + 1)?]));
    let mut copied = (0, Vec::new());
    let Some((_, end)) = labels(answer, HEADER) else { return copied };
    let mut at = end + 4;
    for _ in 0..number(6).unwrap_or(0) {
        let Some(name_end) = skip_name(answer, at) else { break };
        let (Some(found), Some(length)) = (number(name_end), number(name_end + 8)) else { break };
        let (start, end) = (name_end, name_end + 10 + usize::from(length));
        let Some(record) = answer.get(start..end) else { break };
        if found == kind {
            write_name(&mut copied.1, target);
            copied.1.extend_from_slice(record);
            copied.0 += 1;
        }
        at = end;
    }
    copied
}

fn named(name: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(name.len() + 2);
    write_name(&mut bytes, name);
    bytes
}

fn write_name(bytes: &mut Vec<u8>, name: &str) {
    for label in name.trim_end_matches('.').split('.').filter(|label| !label.is_empty()) {
        let label = &label.as_bytes()[..label.len().min(LONGEST_LABEL)];
        bytes.push(u8::try_from(label.len()).unwrap_or(0));
        bytes.extend_from_slice(label);
    }
    bytes.push(0);
}

/// The labels of a name that is written out, and where it ends.
fn labels(bytes: &[u8], start: usize) -> Option<(Vec<String>, usize)> {
    let (mut labels, mut at) = (Vec::new(), start);
    loop {
        let length = usize::from(*bytes.get(at)?);
        if length == 0 {
            return Some((labels, at + 1));
        }
        // Questions name nothing before them.
        if length > LONGEST_LABEL || at - start + length > LONGEST_NAME {
            return None;
        }
        let label = bytes.get(at + 1..at + 1 + length)?;
        labels.push(String::from_utf8_lossy(label).to_ascii_lowercase());
        at += 1 + length;
    }
}

/// Where a name ends, be it written out or a pointer.
fn skip_name(bytes: &[u8], mut at: usize) -> Option<usize> {
    loop {
        let length = usize::from(*bytes.get(at)?);
        match length {
            0 => return Some(at + 1),
            0xC0.. => return Some(at + 2),
            _ => at += 1 + length,
        }
    }
}

/// The size that a client takes, which stands in a record behind the question.
fn options(bytes: &[u8], mut at: usize, count: u16) -> Option<usize> {
    let number = |at: usize| Some(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]));
    for _ in 0..count {
        let end = skip_name(bytes, at)?;
        if number(end)? == OPTIONS {
            return number(end + 2).map(usize::from);
        }
        at = end + 10 + usize::from(number(end + 8)?);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_is_read_and_answered() {
        let bytes = ask(7, "Web.Shop.svc.cluster.local", A);
        let question = Question::parse(&bytes).unwrap();
        assert_eq!(
            (question.id, question.name().as_str(), question.kind),
            (7, "web.shop.svc.cluster.local", A)
        );
        let address = Record::new(Data::Address(Ipv4Addr::new(127, 9, 0, 5)));
        let sections = Sections { answers: vec![address], ..Sections::default() };
        let answer = question.answer(Code::Fine, true, &sections, true);
        assert_eq!(answer[..4], [0, 7, 0x85, 0x80]);
        assert_eq!(answer[4..12], [0, 1, 0, 1, 0, 0, 0, 0]);
        assert!(answer[12..].starts_with(b"\x03Web\x04Shop"), "the letters are those of the client");
        assert!(answer.ends_with(&[0xC0, 0x0C, 0, 1, 0, 1, 0, 0, 0, 5, 0, 4, 127, 9, 0, 5]));
        assert_eq!(
            copied(&answer, "b.example", A),
            (1, [b"\x01b\x07example\0".as_slice(), &answer[answer.len() - 14..]].concat())
        );
        assert!(matches!(Question::parse(&answer), Err(None)), "an answer is not answered");
    }

    #[test]
    fn an_answer_that_is_too_large_for_udp_says_so() {
        let mut bytes = ask(7, "web.shop", A);
        let question = Question::parse(&bytes).unwrap();
        let one = Record::new(Data::Address(Ipv4Addr::LOCALHOST));
        let sections = Sections { answers: vec![one; 100], ..Sections::default() };
        let cut = question.answer(Code::Fine, true, &sections, true);
        assert!(cut.len() < SMALL && cut[2] & 2 != 0 && cut[7] == 0 && is_truncated(&cut));
        assert!(question.answer(Code::Fine, true, &sections, false).len() > 1600);
        bytes[11] = 1;
        bytes.extend_from_slice(&[0, 0, 41, 0x10, 0, 0, 0, 0, 0, 0, 0]);
        let larger = Question::parse(&bytes).unwrap().answer(Code::Fine, true, &sections, true);
        assert!(larger.len() > 1600 && larger[2] & 2 == 0 && !is_truncated(&larger));
    }

    #[test]
    fn garbage_is_refused_and_never_panics() {
        assert!(matches!(Question::parse(b""), Err(None)));
        let good = ask(7, "web.shop", A);
        for end in 0..good.len() {
            assert!(Question::parse(&good[..end]).is_err());
        }
        let mut looped = good.clone();
        looped[12] = 0xC0;
        looped[13] = 12;
        let Err(Some(answer)) = Question::parse(&looped) else {
            panic!("a pointer in a question is malformed")
        };
        assert_eq!((answer.len(), answer[3] & 15), (12, 1));
        for at in 0..good.len() {
            for byte in 0..=255 {
                let mut odd = good.clone();
                odd[at] = byte;
                let _ = Question::parse(&odd);
                let _ = copied(&odd, "a", A);
            }
        }
    }
}
