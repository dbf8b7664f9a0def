//! Events as lines of text, for people who read a log or a terminal without the view.

use std::fmt::Write as _;

use crate::record::{CallRecord, Event, HeldCall, Note};

/// How much of a request is shown on one line.
const REQUEST_SHOWN: usize = 400;

/// An event as text, with an end of line; empty for what a person need not see.
pub fn text(event: &Event, colours: bool) -> String {
    match event {
        Event::Call(call) if is_routine(call) => String::new(),
        Event::Call(call) => call_text(call, colours),
        Event::Held(held) => held_text(held),
        Event::Note(note) => note_text(note, colours),
    }
}

/// Whether a call only asks about the driver, and went well: these come all the time.
pub fn is_routine(call: &CallRecord) -> bool {
    let asks = ["/csi.v1.Identity/", "/csi.v1.Node/NodeGetCapabilities", "/csi.v1.Node/NodeGetInfo"];
    let asks =
        asks.iter().any(|method| call.method.starts_with(method)) || call.name().ends_with("GetCapabilities");
    let asks = asks || matches!(call.name(), "GetCapacity" | "NodeGetVolumeStats" | "ListVolumes");
    asks && call.code == "OK" && call.broken.is_empty() && call.faults.is_empty()
}

fn coloured(text: &str, colour: &str, colours: bool) -> String {
    if colours { format!("\x1b[{colour}m{text}\x1b[0m") } else { text.to_owned() }
}

fn call_text(call: &CallRecord, colours: bool) -> String {
    let code = format!("{:<20}", call.code);
    let code = coloured(&code, if call.code == "OK" { "32" } else { "33" }, colours);
    let mut text =
        format!("{} {:>4}  {:<28} {code} {:>9}\n", clock(call.time), call.number, call.name(), took(call));
    // Writing to memory does not fail.
    let mut add = |line: &str| {
        let _ = writeln!(text, "                    {line}");
    };
    for fault in &call.faults {
        add(&coloured(&format!("! {fault}"), "35", colours));
    }
    if !call.message.is_empty() {
        add(&call.message);
    }
    for effect in &call.effects {
        add(effect);
    }
    for broken in &call.broken {
        let line = format!("✗ {} ({}): {} {}", broken.id, broken.level, broken.rule, broken.found);
        add(&coloured(&line, if broken.is_fault() { "31" } else { "33" }, colours));
    }
    if call.code != "OK" || !call.broken.is_empty() {
        for line in call.log.iter().take(10) {
            add(&format!("| {line}"));
        }
    }
    text
}

fn held_text(held: &HeldCall) -> String {
    let mut request = held.request.to_string();
    if let Some((at, _)) = request.char_indices().nth(REQUEST_SHOWN) {
        request.truncate(at);
        request.push('…');
    }
    format!(
        "Call {} waits: {}\n    {request}\n    see  {}\n    then n (send it), c (send all from now on), a CODE MESSAGE or a OK [ID] (answer it by hand)\n",
        held.number,
        crate::record::short(&held.method),
        held.inspect
    )
}

fn note_text(note: &Note, colours: bool) -> String {
    let text = note.text.replace('\n', "\n    ");
    format!("{} {}\n", clock(note.time), if note.fault { coloured(&text, "31", colours) } else { text })
}

/// The time of day in UTC.
pub(crate) fn clock(time: jiff::Timestamp) -> String {
    time.strftime("%H:%M:%S.%3f").to_string()
}

pub(crate) fn took(call: &CallRecord) -> String {
    #[expect(clippy::cast_precision_loss, reason = "it is shown with one digit")]
    let milliseconds = call.duration_us as f64 / 1000.0;
    format!("{milliseconds:.1} ms")
}

#[cfg(test)]
pub(crate) mod tests {
    use berth_certify::rules::RULES;
    use serde_json::Value;

    use super::*;
    use crate::record::BrokenRule;

    pub(crate) fn call(method: &str, code: &str) -> CallRecord {
        CallRecord {
            number: 7,
            time: "2026-01-01T10:20:30.4567Z".parse().unwrap(),
            method: method.to_owned(),
            code: code.to_owned(),
            message: String::new(),
            duration_us: 12_345,
            request: Value::Null,
            response: Value::Null,
            effects: Vec::new(),
            broken: Vec::new(),
            faults: Vec::new(),
            log: vec!["a line of the driver".to_owned()],
        }
    }

    #[test]
    fn a_call_is_shown_with_its_effects_and_the_rules_it_broke() {
        let rule = RULES.iter().find(|rule| rule.id == "call.published").unwrap();
        let record = CallRecord {
            effects: vec!["+ mount node/pods/x (ext4)".to_owned()],
            broken: vec![BrokenRule::new(rule, "nothing is mounted at target_path /x".to_owned())],
            ..call("/csi.v1.Node/NodePublishVolume", "OK")
        };
        let shown = text(&Event::Call(record), false);
        let lines: Vec<_> = shown.lines().map(str::trim).collect();
        assert!(lines[0].starts_with("10:20:30.456    7  NodePublishVolume"), "{shown}");
        assert!(lines[0].contains("OK") && lines[0].ends_with("12.3 ms"), "{shown}");
        assert_eq!(lines[1], "+ mount node/pods/x (ext4)");
        assert!(lines[2].starts_with("✗ call.published (MUST): After NodePublishVolume"), "{shown}");
        assert!(lines[2].ends_with("nothing is mounted at target_path /x"), "{shown}");
        assert_eq!(lines[3], "| a line of the driver");
    }

    #[test]
    fn questions_about_the_driver_are_not_shown_unless_they_fail() {
        assert_eq!(text(&Event::Call(call("/csi.v1.Identity/Probe", "OK")), false), "");
        assert!(text(&Event::Call(call("/csi.v1.Identity/Probe", "INTERNAL")), false).contains("INTERNAL"));
    }
}
