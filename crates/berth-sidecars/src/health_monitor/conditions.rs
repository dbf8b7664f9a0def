//! Which events a volume's health needs: one for each change, and a repetition before an event expires.

use berth_core::names::events;
use std::collections::HashMap;
use std::time::Duration;

use berth_kube::Key;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Event;

use crate::driver::Health;

/// The event that says what is wrong.
pub(super) const ABNORMAL: &str = events::VOLUME_CONDITION_ABNORMAL;
/// The event that says that nothing is wrong any more.
pub(super) const NORMAL: &str = events::VOLUME_CONDITION_NORMAL;
/// How long trouble has one event only: Kubernetes keeps events for an hour, and people must find one.
const REMINDER: Duration = Duration::from_mins(50);

/// The last event about trouble of a claim, and its time.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ReportedCondition {
    claim: Key,
    wrong: String,
    at: Timestamp,
}

/// What was reported, by the UID of the claim; those of whom nothing wrong was reported, or that are well again, are not in it.
#[derive(Debug, Default)]
pub(super) struct Memory {
    reported: HashMap<String, ReportedCondition>,
}

/// What is to be reported.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ConditionEvent {
    /// The volume is abnormal; the text says what is wrong.
    Abnormal(String),
    /// Nothing is wrong any more.
    Normal,
}

impl Memory {
    /// What events of ours that are still there reported.
    pub(super) fn from_events(events: Vec<Event>) -> Self {
        let mut last: HashMap<String, (Timestamp, Option<ReportedCondition>)> = HashMap::new();
        for event in events {
            let at = event.last_timestamp.map(|time| time.0).or(event.event_time.map(|time| time.0));
            let about = event.involved_object;
            let (Some(uid), Some(at)) = (about.uid, at) else { continue };
            let reported = match event.reason.as_deref() {
                Some(ABNORMAL) => Some(ReportedCondition {
                    claim: Key::new(about.namespace.unwrap_or_default(), about.name.unwrap_or_default()),
                    wrong: event.message.unwrap_or_default(),
                    at,
                }),
                Some(NORMAL) => None,
                _ => continue,
            };
            if last.get(&uid).is_none_or(|(known, _)| *known <= at) {
                last.insert(uid, (at, reported));
            }
        }
        Self {
            reported: last.into_iter().filter_map(|(uid, (_, reported))| Some((uid, reported?))).collect(),
        }
    }

    /// The claims that have an event about trouble.
    pub(super) fn ill(&self) -> Vec<Key> {
        self.reported.values().map(|reported| reported.claim.clone()).collect()
    }

    /// Records how a claim's volume is, and returns the event that this needs.
    pub(super) fn observe(
        &mut self,
        uid: &str,
        claim: &Key,
        health: &Health,
        now: Timestamp,
    ) -> Option<ConditionEvent> {
        match (health, self.reported.get(uid)) {
            (Health::Well, None) => None,
            (Health::Well, Some(_)) => {
                self.reported.remove(uid);
                Some(ConditionEvent::Normal)
            }
            (Health::Ill(wrong), Some(reported))
                if reported.wrong == *wrong && now.duration_since(reported.at).unsigned_abs() < REMINDER =>
            {
                None
            }
            (Health::Ill(wrong), _) => {
                let reported = ReportedCondition { claim: claim.clone(), wrong: wrong.clone(), at: now };
                self.reported.insert(uid.to_owned(), reported);
                Some(ConditionEvent::Abnormal(wrong.clone()))
            }
        }
    }

    /// Forgets a claim that is gone.
    pub(super) fn forget(&mut self, uid: &str) {
        self.reported.remove(uid);
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    use super::*;

    fn at(minute: i64) -> Timestamp {
        Timestamp::from_second(minute * 60).unwrap()
    }

    fn claim() -> Key {
        Key::new("n", "c")
    }

    fn ill(wrong: &str) -> Health {
        Health::Ill(wrong.to_owned())
    }

    #[test]
    fn only_changes_are_recorded_and_a_reminder_before_events_expire() {
        let mut memory = Memory::default();
        let abnormal = |wrong: &str| Some(ConditionEvent::Abnormal(wrong.to_owned()));
        for (minute, health, expected) in [
            (0, Health::Well, None),
            (5, ill("slow"), abnormal("slow")),
            (10, ill("slow"), None),
            (15, ill("gone"), abnormal("gone")),
            (60, ill("gone"), None),
            (65, ill("gone"), abnormal("gone")),
            (70, Health::Well, Some(ConditionEvent::Normal)),
            (75, Health::Well, None),
            (80, ill("gone"), abnormal("gone")),
        ] {
            assert_eq!(
                memory.observe("a", &claim(), &health, at(minute)),
                expected,
                "after {minute} minutes"
            );
        }
        assert_eq!(memory.observe("b", &claim(), &Health::Well, at(80)), None, "another claim is its own");
        memory.forget("a");
        assert_eq!(memory.observe("a", &claim(), &Health::Well, at(85)), None);
    }

    #[test]
    fn a_successor_knows_from_the_events_what_was_recorded() {
        let event = |uid: &str, reason: &str, message: &str, minute: i64| {
            let mut event = Event { reason: Some(reason.to_owned()), ..Event::default() };
            event.involved_object.uid = Some(uid.to_owned());
            event.involved_object.name = Some(uid.to_owned());
            event.involved_object.namespace = Some("n".to_owned());
            event.message = Some(message.to_owned());
            event.last_timestamp = Some(Time(at(minute)));
            event
        };
        let mut memory = Memory::from_events(vec![
            event("a", ABNORMAL, "slow", 10),
            event("b", NORMAL, "The Volume returns to the healthy state", 20),
            event("b", ABNORMAL, "slow", 10),
            event("c", "NodeFailed", "Pods: …", 10),
        ]);
        assert_eq!(memory.ill(), [Key::new("n", "a")]);
        assert_eq!(memory.observe("a", &claim(), &ill("slow"), at(15)), None);
        assert_eq!(memory.observe("a", &claim(), &Health::Well, at(20)), Some(ConditionEvent::Normal));
        assert_eq!(memory.observe("b", &claim(), &Health::Well, at(20)), None);
    }
}
