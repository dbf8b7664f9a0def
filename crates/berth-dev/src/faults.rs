//! Faults that the workbench makes between a caller and a driver: what is asked for, and what becomes of one call.
//!
//! ```text
//! KIND[=VALUE][@RPC[,RPC…]][:before|during|after][/COUNT|/PERCENT%|/all]
//! ```
//!
//! Which calls are hit, and at which moment, depends on the seed, on the method, and on how many calls of it came before: the same seed
//! gives the same faults for the same calls, whatever else happens at the time.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use berth_csi::code;
use tonic::Code;

use crate::messages::{code_named, concerns_volumes, method_named};
use crate::record::short;

/// The longest time into a call at which the driver is killed during it.
const LONGEST_INTO_CALL: Duration = Duration::from_millis(20);
/// How many copies of a call may be sent.
const MOST_COPIES: u32 = 64;

/// One fault, as it was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    kind: Kind,
    /// The methods that it hits; all that concern volumes if there are none.
    methods: Vec<&'static str>,
    limit: Limit,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Kill(Moment),
    Repeat(u32),
    DropAnswer,
    Timeout(Duration),
    Delay(Duration),
    Concurrent(u32),
    Code(Code),
    Reorder,
}

/// When the driver is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    Before,
    During,
    After,
}

/// Which of the calls that match are hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Limit {
    /// The first so many of each method.
    First(u32),
    /// Each with this chance, in percent.
    Chance(u32),
    All,
}

/// What becomes of one call.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) delay: Option<Duration>,
    pub(crate) reorder: bool,
    /// When the driver is killed, and for a kill during the call how long after it was sent.
    pub(crate) kill: Option<(Moment, Duration)>,
    pub(crate) code: Option<Code>,
    pub(crate) timeout: Option<Duration>,
    /// How often it is sent one after the other.
    pub(crate) repeat: u32,
    /// How often it is sent at once.
    pub(crate) concurrent: u32,
    pub(crate) drop_answer: bool,
    /// The faults that make up the plan, for people.
    pub(crate) names: Vec<String>,
}

/// All faults that are asked for, and how many calls came.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    seed: u64,
    asked_for: Vec<Fault>,
    /// How many calls of each method came.
    calls: BTreeMap<String, u64>,
}

impl Faults {
    pub(crate) fn new(seed: u64, faults: Vec<Fault>) -> Self {
        Self { seed, asked_for: faults, calls: BTreeMap::new() }
    }

    pub(crate) fn add(&mut self, fault: Fault) {
        self.asked_for.push(fault);
    }

    pub(crate) fn clear(&mut self) {
        self.asked_for.clear();
    }

    /// Sends every call twice, or no longer.
    pub(crate) fn toggle_repeat(&mut self) -> bool {
        let twice = Fault { kind: Kind::Repeat(2), methods: Vec::new(), limit: Limit::All };
        let before = self.asked_for.len();
        self.asked_for.retain(|fault| *fault != twice);
        let added = self.asked_for.len() == before;
        if added {
            self.asked_for.push(twice);
        }
        added
    }

    /// Each fault as it was asked for.
    pub(crate) fn list(&self) -> Vec<String> {
        self.asked_for.iter().map(Fault::to_string).collect()
    }

    /// What becomes of the next call of this method.
    pub(crate) fn plan(&mut self, method: &str) -> Plan {
        let nth = self.calls.entry(method.to_owned()).or_default();
        *nth += 1;
        let nth = *nth;
        let mut plan = Plan { repeat: 1, concurrent: 1, ..Plan::default() };
        for (index, fault) in self.asked_for.iter().enumerate() {
            let number = random(self.seed, index, method, nth);
            if !fault.hits(method, nth, number) {
                continue;
            }
            plan.names.push(fault.to_string());
            match fault.kind {
                Kind::Kill(moment) => plan.kill = Some((moment, fraction(LONGEST_INTO_CALL, number))),
                Kind::Repeat(times) => plan.repeat = plan.repeat.max(times),
                Kind::DropAnswer => plan.drop_answer = true,
                Kind::Timeout(time) => plan.timeout = Some(time),
                Kind::Delay(time) => plan.delay = Some(time),
                Kind::Concurrent(copies) => plan.concurrent = plan.concurrent.max(copies),
                Kind::Code(code) => plan.code = Some(code),
                Kind::Reorder => plan.reorder = true,
            }
        }
        plan
    }
}

/// A number that depends on nothing but these (SplitMix64).
fn random(seed: u64, fault: usize, method: &str, nth: u64) -> u64 {
    let mut state = seed ^ nth.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (fault as u64).rotate_left(32);
    for byte in method.bytes() {
        state = (state ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3);
    }
    state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    state = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    state = (state ^ (state >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    state ^ (state >> 31)
}

/// A part of a time, chosen by a random number.
fn fraction(whole: Duration, number: u64) -> Duration {
    whole * u32::try_from(number % 1024).unwrap_or_default() / 1024
}

impl Fault {
    fn hits(&self, method: &str, nth: u64, number: u64) -> bool {
        let named = self.methods.contains(&method) || (self.methods.is_empty() && concerns_volumes(method));
        named
            && match self.limit {
                Limit::First(count) => nth <= u64::from(count),
                Limit::Chance(percent) => (number >> 32) % 100 < u64::from(percent),
                Limit::All => true,
            }
    }

    /// Whether it kills the driver, which only a driver that was started here survives.
    pub fn kills(&self) -> bool {
        matches!(self.kind, Kind::Kill(_))
    }
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (rest, limit) = match text.split_once('/') {
            Some((rest, limit)) => (rest, Some(parse_limit(limit)?)),
            None => (text, None),
        };
        let (rest, moment) = match rest.split_once(':') {
            Some((rest, moment)) => (rest, Some(parse_moment(moment)?)),
            None => (rest, None),
        };
        let (rest, methods) = match rest.split_once('@') {
            Some((rest, methods)) => (rest, methods.split(',').map(parse_method).collect::<Result<_, _>>()?),
            None => (rest, Vec::new()),
        };
        let (name, value) = rest.split_once('=').map_or((rest, None), |(name, value)| (name, Some(value)));
        let kind = parse_kind(name, value, moment.unwrap_or(Moment::During))?;
        if moment.is_some() && !matches!(kind, Kind::Kill(_)) {
            return Err(format!("{name} has no moment; only kill has one, as in kill@NodeStage:before"));
        }
        let once = matches!(kind, Kind::Kill(_) | Kind::DropAnswer | Kind::Timeout(_) | Kind::Code(_));
        // What keeps a call from its answer would keep it from it for ever.
        let limit = limit.unwrap_or(if once { Limit::First(1) } else { Limit::All });
        Ok(Self { kind, methods, limit })
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Kind::Kill(_) => write!(f, "kill")?,
            Kind::Repeat(times) => write!(f, "repeat={times}")?,
            Kind::DropAnswer => write!(f, "drop-answer")?,
            Kind::Timeout(time) => write!(f, "timeout={time:?}")?,
            Kind::Delay(time) => write!(f, "delay={time:?}")?,
            Kind::Concurrent(copies) => write!(f, "concurrent={copies}")?,
            Kind::Code(known) => write!(f, "code={}", code::grpc_name(known))?,
            Kind::Reorder => write!(f, "reorder")?,
        }
        if !self.methods.is_empty() {
            let names: Vec<_> = self.methods.iter().map(|method| short(method)).collect();
            write!(f, "@{}", names.join(","))?;
        }
        match self.kind {
            Kind::Kill(Moment::Before) => write!(f, ":before"),
            Kind::Kill(Moment::During) => write!(f, ":during"),
            Kind::Kill(Moment::After) => write!(f, ":after"),
            _ => Ok(()),
        }
    }
}

fn parse_kind(name: &str, value: Option<&str>, moment: Moment) -> Result<Kind, String> {
    let value = |what: &str| value.ok_or_else(|| format!("{name} needs {what}"));
    let copies = |text: &str| match text.parse() {
        Ok(count @ 2..=MOST_COPIES) => Ok(count),
        _ => Err(format!("{name}={text}: a number from 2 to {MOST_COPIES} is needed")),
    };
    let kind = match name {
        "kill" => Kind::Kill(moment),
        "drop-answer" => Kind::DropAnswer,
        "reorder" => Kind::Reorder,
        "repeat" => Kind::Repeat(copies(value("a number, as in repeat=2")?)?),
        "concurrent" => Kind::Concurrent(copies(value("a number, as in concurrent=8")?)?),
        "timeout" => Kind::Timeout(parse_duration(value("a time, as in timeout=1s")?)?),
        "delay" => Kind::Delay(parse_duration(value("a time, as in delay=200ms")?)?),
        "code" => match code_named(value("a gRPC code, as in code=UNAVAILABLE")?)? {
            Code::Ok => return Err("code=OK is no fault".to_owned()),
            code => Kind::Code(code),
        },
        _ => {
            return Err(format!(
                "there is no fault {name:?}; there are kill, repeat, drop-answer, timeout, delay, concurrent, code and reorder"
            ));
        }
    };
    Ok(kind)
}

fn parse_limit(text: &str) -> Result<Limit, String> {
    let wrong =
        || format!("{text:?} says not which calls: write /3 for the first three, /30% for a chance, or /all");
    if text == "all" {
        return Ok(Limit::All);
    }
    if let Some(percent) = text.strip_suffix('%') {
        return percent
            .parse()
            .ok()
            .filter(|percent| (1..=100).contains(percent))
            .map(Limit::Chance)
            .ok_or_else(wrong);
    }
    text.parse().ok().filter(|count| *count > 0).map(Limit::First).ok_or_else(wrong)
}

fn parse_moment(text: &str) -> Result<Moment, String> {
    match text {
        "before" => Ok(Moment::Before),
        "during" => Ok(Moment::During),
        "after" => Ok(Moment::After),
        _ => Err(format!("{text:?} is no moment of a call; there are before, during and after")),
    }
}

fn parse_method(text: &str) -> Result<&'static str, String> {
    method_named(text).ok_or_else(|| format!("CSI has no call {text:?}"))
}

fn parse_duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is no time; write 200ms, 1s or 2m");
    let (digits, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?);
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    let time = match unit {
        "ms" => Duration::from_millis(number),
        "s" => Duration::from_secs(number),
        "m" => Duration::from_secs(number.saturating_mul(60)),
        _ => return Err(wrong()),
    };
    if time.is_zero() { Err(wrong()) } else { Ok(time) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAGE: &str = "/csi.v1.Node/NodeStageVolume";
    const CREATE: &str = "/csi.v1.Controller/CreateVolume";

    fn plans(seed: u64, faults: &[&str], method: &str, count: usize) -> Vec<Plan> {
        let faults = faults.iter().map(|text| text.parse().unwrap()).collect();
        let mut faults = Faults::new(seed, faults);
        (0..count).map(|_| faults.plan(method)).collect()
    }

    #[test]
    fn faults_are_read_and_written_in_one_form() {
        for text in [
            "kill@NodeStageVolume:before",
            "kill@NodeStageVolume,CreateVolume:after",
            "repeat=2",
            "drop-answer@CreateVolume",
            "timeout=1s@NodePublishVolume",
            "delay=200ms",
            "concurrent=8@CreateVolume",
            "code=UNAVAILABLE@CreateVolume",
            "reorder",
        ] {
            assert_eq!(text.parse::<Fault>().unwrap().to_string(), text);
        }
        assert_eq!("kill@NodeStage".parse::<Fault>().unwrap().to_string(), "kill@NodeStageVolume:during");
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, says) in [
            ("explode", "no fault \"explode\""),
            ("kill@NodeJump", "no call \"NodeJump\""),
            ("kill:later", "no moment"),
            ("repeat", "needs a number"),
            ("repeat=1", "from 2 to 64"),
            ("delay=3", "is no time"),
            ("delay=0s", "is no time"),
            ("code=FINE", "is no gRPC code"),
            ("code=OK", "is no fault"),
            ("repeat=2:before", "has no moment"),
            ("kill/0", "says not which calls"),
            ("kill/101%", "says not which calls"),
        ] {
            let error = text.parse::<Fault>().unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }

    #[test]
    fn what_keeps_a_call_from_its_answer_hits_the_first_one_unless_more_are_asked_for() {
        let hit =
            |text| plans(1, &[text], CREATE, 4).iter().map(|plan| !plan.names.is_empty()).collect::<Vec<_>>();
        assert_eq!(hit("drop-answer@CreateVolume"), [true, false, false, false]);
        assert_eq!(hit("drop-answer@CreateVolume/2"), [true, true, false, false]);
        assert_eq!(hit("drop-answer@CreateVolume/all"), [true; 4]);
        assert_eq!(hit("delay=1ms"), [true; 4]);
        assert_eq!(hit("delay=1ms@NodeStage"), [false; 4]);
        let probes = plans(1, &["repeat=2"], "/csi.v1.Identity/Probe", 1);
        assert_eq!(probes[0].repeat, 1, "without names only calls about volumes are meant");
    }

    #[test]
    fn a_seed_gives_the_same_faults_again_and_another_one_others() {
        let faults = ["code=ABORTED/30%", "kill@NodeStage:during/50%"];
        let of = |seed| plans(seed, &faults, STAGE, 64);
        assert_eq!(of(7), of(7));
        assert_ne!(of(7), of(8));
        let hit = of(7).iter().filter(|plan| plan.code.is_some()).count();
        assert!((5..=35).contains(&hit), "{hit} of 64 with a chance of 30 %");
        let moments: std::collections::BTreeSet<_> =
            of(7).iter().filter_map(|plan| Some(plan.kill?.1)).collect();
        assert!(moments.len() > 5, "{moments:?}");
        // Calls of other methods in between change nothing.
        let mut mixed = Faults::new(7, faults.iter().map(|text| text.parse().unwrap()).collect());
        let between: Vec<Plan> = (0..64)
            .map(|_| {
                mixed.plan(CREATE);
                mixed.plan(STAGE)
            })
            .collect();
        assert_eq!(between, of(7));
    }

    #[test]
    fn repeating_every_call_is_switched_on_and_off() {
        let mut faults = Faults::new(1, vec!["delay=1s".parse().unwrap()]);
        assert!(faults.toggle_repeat());
        assert_eq!(faults.list(), ["delay=1s", "repeat=2"]);
        assert!(!faults.toggle_repeat());
        assert_eq!(faults.list(), ["delay=1s"]);
    }
}
