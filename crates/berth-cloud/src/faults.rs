//! Faults that a person or a test asks for: which call, how often, and what goes wrong.
//!
//! `CALL=EFFECT[,after=N][,times=N]`, such as `volumes.create=after:500` or `AttachDisk=errored,after=2,times=3`. `CALL` is the kind
//! of a call, as the counts of calls name it; with a `*` at its end, every kind that begins so. The first `after` calls that
//! match are spared, and the next `times` (one, unless it says otherwise; `always` for all) have the effect.

use std::time::Duration;

use parking_lot::Mutex;

use crate::account::parse_duration;

/// The effect of a fault on the calls that it is about.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Effect {
    Before(u16),
    After(u16),
    DropBefore,
    DropAfter,
    HangBefore,
    HangAfter,
    Throttle,
    Slow(Duration),
    Errored,
    NoDevice,
    LateDevice(Duration),
    OtherName,
}

/// How the device of a disk that is attached appears.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum Device {
    #[default]
    AsUsual,
    Late(Duration),
    OtherName,
    Never,
}

/// Instead of the usual answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    Status(u16),
    /// The connection is closed without an answer.
    Drop,
    /// The connection stays open without an answer, until the caller closes it.
    Hang,
    Throttled,
}

/// All that goes wrong with one call.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Effects {
    pub(crate) slow: Duration,
    /// Answered instead of doing anything.
    pub(crate) before: Option<Answer>,
    /// Answered when everything is done.
    pub(crate) after: Option<Answer>,
    /// What the call starts ends in an error.
    pub(crate) errored: bool,
    pub(crate) device: Device,
}

/// One fault, and how often it still happens.
#[derive(Debug, Clone)]
pub(crate) struct Fault {
    text: String,
    call: String,
    effect: Effect,
    spared: u64,
    /// `None` is for ever.
    times: Option<u64>,
}

impl Fault {
    /// Reads a fault; the error says what is wrong with it.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let wrong =
            |what: String| format!("the fault `{text}` {what}; it is CALL=EFFECT[,after=N][,times=N]");
        let (call, rest) = text.trim().split_once('=').ok_or_else(|| wrong("has no effect".to_owned()))?;
        if call.is_empty() {
            return Err(wrong("names no call".to_owned()));
        }
        let mut parts = rest.split(',').map(str::trim);
        let effect = parts.next().unwrap_or_default();
        let (name, value) = effect.split_once(':').unwrap_or((effect, ""));
        let status = || {
            value
                .parse()
                .ok()
                .filter(|status| (400..600).contains(status))
                .ok_or_else(|| wrong(format!("has `{value}` where a status from 400 to 599 belongs")))
        };
        let effect = match name {
            "before" => Effect::Before(status()?),
            "after" => Effect::After(status()?),
            "drop-before" => Effect::DropBefore,
            "drop-after" => Effect::DropAfter,
            "hang-before" => Effect::HangBefore,
            "hang-after" => Effect::HangAfter,
            "throttle" => Effect::Throttle,
            "slow" => Effect::Slow(parse_duration(value)?),
            "errored" => Effect::Errored,
            "no-device" => Effect::NoDevice,
            "late-device" => Effect::LateDevice(parse_duration(value)?),
            "other-name" => Effect::OtherName,
            _ => {
                return Err(wrong(format!(
                    "has an unknown effect `{name}` (known: before:STATUS, after:STATUS, drop-before, drop-after, hang-before, \
                     hang-after, throttle, slow:DURATION, errored, no-device, late-device:DURATION, other-name)"
                )));
            }
        };
        let mut fault =
            Self { text: text.trim().to_owned(), call: call.to_owned(), effect, spared: 0, times: Some(1) };
        for part in parts {
            let number = |value: &str| {
                value.parse().map_err(|_| wrong(format!("has `{value}` where a number belongs")))
            };
            match part.split_once('=') {
                Some(("after", value)) => fault.spared = number(value)?,
                Some(("times", "always")) => fault.times = None,
                Some(("times", value)) => fault.times = Some(number(value)?),
                _ => return Err(wrong(format!("has an unknown part `{part}`"))),
            }
        }
        Ok(fault)
    }

    fn matches(&self, kind: &str) -> bool {
        match self.call.strip_suffix('*') {
            Some(prefix) => kind.starts_with(prefix),
            None => self.call == kind,
        }
    }
}

/// The faults that are asked for now.
#[derive(Default)]
pub(crate) struct Faults(Mutex<Vec<Fault>>);

impl Faults {
    pub(crate) fn new(faults: Vec<Fault>) -> Self {
        Self(Mutex::new(faults))
    }

    pub(crate) fn add(&self, faults: Vec<Fault>) {
        self.0.lock().extend(faults);
    }

    pub(crate) fn clear(&self) {
        self.0.lock().clear();
    }

    /// Each fault as it was given, with how often it still happens.
    pub(crate) fn list(&self) -> Vec<(String, Option<u64>)> {
        self.0.lock().iter().map(|fault| (fault.text.clone(), fault.times)).collect()
    }

    /// What goes wrong with this call; counts it.
    pub(crate) fn strike(&self, kind: &str) -> Effects {
        let mut effects = Effects::default();
        for fault in self.0.lock().iter_mut().filter(|fault| fault.matches(kind)) {
            if fault.spared > 0 {
                fault.spared -= 1;
                continue;
            }
            match &mut fault.times {
                Some(0) => continue,
                Some(times) => *times -= 1,
                None => {}
            }
            match &fault.effect {
                Effect::Before(status) => effects.before = Some(Answer::Status(*status)),
                Effect::After(status) => effects.after = Some(Answer::Status(*status)),
                Effect::DropBefore => effects.before = Some(Answer::Drop),
                Effect::DropAfter => effects.after = Some(Answer::Drop),
                Effect::HangBefore => effects.before = Some(Answer::Hang),
                Effect::HangAfter => effects.after = Some(Answer::Hang),
                Effect::Throttle => effects.before = Some(Answer::Throttled),
                Effect::Slow(by) => effects.slow += *by,
                Effect::Errored => effects.errored = true,
                Effect::NoDevice => effects.device = Device::Never,
                Effect::LateDevice(by) => effects.device = Device::Late(*by),
                Effect::OtherName => effects.device = Device::OtherName,
            }
        }
        effects
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_spares_the_first_calls_and_ends() {
        let faults = Faults::new(vec![Fault::parse("volumes.*=before:503,after=1,times=2").unwrap()]);
        let strike = |kind: &str| faults.strike(kind).before;
        assert_eq!(strike("volumes.list"), None);
        assert_eq!(strike("account.get"), None);
        assert_eq!(strike("volumes.create"), Some(Answer::Status(503)));
        assert_eq!(strike("volumes.list"), Some(Answer::Status(503)));
        assert_eq!(strike("volumes.list"), None);
    }

    #[test]
    fn effects_of_several_faults_add_up() {
        let parse = |text: &str| Fault::parse(text).unwrap();
        let faults = Faults::new(vec![
            parse("*=slow:250ms,times=always"),
            parse("AttachDisk=late-device:2s"),
            parse("AttachDisk=drop-after"),
        ]);
        let both = Effects {
            slow: Duration::from_millis(250),
            after: Some(Answer::Drop),
            device: Device::Late(Duration::from_secs(2)),
            ..Effects::default()
        };
        assert_eq!(faults.strike("AttachDisk"), both);
        assert_eq!(faults.strike("AttachDisk"), Effects { slow: both.slow, ..Effects::default() });
    }

    #[test]
    fn what_is_wrong_with_a_fault_is_said() {
        for (text, why) in [
            ("volumes.create", "has no effect"),
            ("=errored", "names no call"),
            ("a=sideways", "unknown effect `sideways`"),
            ("a=before:200", "a status from 400 to 599"),
            ("a=slow:soon", "is no duration"),
            ("a=errored,times=x", "where a number belongs"),
            ("a=errored,often", "unknown part `often`"),
        ] {
            let error = Fault::parse(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
