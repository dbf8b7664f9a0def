//! What is worth telling of a volume's health: changes, and what Kubernetes is about to forget.

use std::collections::HashMap;
use std::time::Duration;

use berth_kube::Key;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Event;

use crate::driver::Health;

/// The event that tells what is wrong.
pub(super) const ABNORMAL: &str = "VolumeConditionAbnormal";
/// The event that tells that nothing is wrong any more.
pub(super) const NORMAL: &str = "VolumeConditionNormal";
/// How long something wrong is told only once: Kubernetes keeps events for an hour, and who looks must find one.
const REMINDER: Duration = Duration::from_mins(50);

/// What was last told of a claim as wrong, and when.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Told {
    claim: Key,
    wrong: String,
    at: Timestamp,
}

/// What was told, by the UID of the claim; those of whom nothing wrong was told, or that are well again, are not in it.
#[derive(Debug, Default)]
pub(super) struct Memory {
    told: HashMap<String, Told>,
}

/// What is to be told.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum News {
    /// What is wrong.
    Abnormal(String),
    /// Nothing is wrong any more.
    Normal,
}

impl Memory {
    /// What events of ours that are still there told.
    pub(super) fn from_events(events: Vec<Event>) -> Self {
        let mut last: HashMap<String, (Timestamp, Option<Told>)> = HashMap::new();
        for event in events {
            let at = event.last_timestamp.map(|time| time.0).or(event.event_time.map(|time| time.0));
            let about = event.involved_object;
            let (Some(uid), Some(at)) = (about.uid, at) else { continue };
            let told = match event.reason.as_deref() {
                Some(ABNORMAL) => Some(Told {
                    claim: Key::new(about.namespace.unwrap_or_default(), about.name.unwrap_or_default()),
                    wrong: event.message.unwrap_or_default(),
                    at,
                }),
                Some(NORMAL) => None,
                _ => continue,
            };
            if last.get(&uid).is_none_or(|(known, _)| *known <= at) {
                last.insert(uid, (at, told));
            }
        }
        Self { told: last.into_iter().filter_map(|(uid, (_, told))| Some((uid, told?))).collect() }
    }

    /// The claims of which something was told as wrong.
    pub(super) fn ill(&self) -> Vec<Key> {
        self.told.values().map(|told| told.claim.clone()).collect()
    }

    /// Remembers how a claim's volume is, and says what is to be told of it.
    pub(super) fn hear(&mut self, uid: &str, claim: &Key, health: &Health, now: Timestamp) -> Option<News> {
        match (health, self.told.get(uid)) {
            (Health::Well, None) => None,
            (Health::Well, Some(_)) => {
                self.told.remove(uid);
                Some(News::Normal)
            }
            (Health::Ill(wrong), Some(told))
                if told.wrong == *wrong && now.duration_since(told.at).unsigned_abs() < REMINDER =>
            {
                None
            }
            (Health::Ill(wrong), _) => {
                let told = Told { claim: claim.clone(), wrong: wrong.clone(), at: now };
                self.told.insert(uid.to_owned(), told);
                Some(News::Abnormal(wrong.clone()))
            }
        }
    }

    /// Forgets a claim that is gone.
    pub(super) fn forget(&mut self, uid: &str) {
        self.told.remove(uid);
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
    fn only_changes_are_told_and_a_reminder_before_kubernetes_forgets() {
        let mut memory = Memory::default();
        let abnormal = |wrong: &str| Some(News::Abnormal(wrong.to_owned()));
        for (minute, health, expected) in [
            (0, Health::Well, None),
            (5, ill("slow"), abnormal("slow")),
            (10, ill("slow"), None),
            (15, ill("gone"), abnormal("gone")),
            (60, ill("gone"), None),
            (65, ill("gone"), abnormal("gone")),
            (70, Health::Well, Some(News::Normal)),
            (75, Health::Well, None),
            (80, ill("gone"), abnormal("gone")),
        ] {
            assert_eq!(memory.hear("a", &claim(), &health, at(minute)), expected, "after {minute} minutes");
        }
        assert_eq!(memory.hear("b", &claim(), &Health::Well, at(80)), None, "another claim is its own");
        memory.forget("a");
        assert_eq!(memory.hear("a", &claim(), &Health::Well, at(85)), None);
    }

    #[test]
    fn a_successor_knows_from_the_events_what_was_told() {
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
        assert_eq!(memory.hear("a", &claim(), &ill("slow"), at(15)), None);
        assert_eq!(memory.hear("a", &claim(), &Health::Well, at(20)), Some(News::Normal));
        assert_eq!(memory.hear("b", &claim(), &Health::Well, at(20)), None);
    }
}
