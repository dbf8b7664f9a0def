//! What becomes of occurrences, under a clock that the tests turn.

use super::*;

fn occurrence(object: &str, reason: &str, message: &str) -> Occurrence {
    Occurrence {
        about: ObjectReference {
            name: Some(object.to_owned()),
            namespace: Some("default".to_owned()),
            ..ObjectReference::default()
        },
        severity: Severity::Warning,
        reason: reason.to_owned(),
        message: message.to_owned(),
        at: Timestamp::now(),
    }
}

/// Answers every request that is due; name, count and message of each.
fn written(events: &mut Correlator, now: Instant) -> Vec<(String, i32, String)> {
    let mut written = Vec::new();
    while let Ok((key, request)) = events.next(now) {
        written.push(match request {
            Request::Create(creation) => (creation.name, creation.count, creation.of.message),
            Request::CountUp(count_up) => {
                (count_up.name, count_up.count, count_up.message.unwrap_or_default())
            }
        });
        events.finish(now, key, Outcome::Written);
    }
    written
}

#[test]
fn the_last_count_is_written_when_a_second_is_over() {
    let (mut events, begun) = (Correlator::default(), Instant::now());
    events.record(begun, occurrence("a", "Broken", "no"));
    assert_eq!(written(&mut events, begun).len(), 1);
    for _ in 0..4 {
        events.record(begun + Duration::from_millis(10), occurrence("a", "Broken", "no"));
    }
    let soon = begun + Duration::from_millis(20);
    assert_eq!(events.next(soon).unwrap_err(), Some(begun + PACE));
    let counted = written(&mut events, begun + PACE);
    assert_eq!(counted.iter().map(|(_, count, _)| *count).collect::<Vec<_>>(), [5]);
    assert!(written(&mut events, begun + PACE * 2).is_empty());
}

#[test]
fn what_happens_before_the_event_is_written_is_counted_in_it() {
    let (mut events, now) = (Correlator::default(), Instant::now());
    for _ in 0..3 {
        events.record(now, occurrence("a", "Broken", "no"));
    }
    let (key, request) = events.next(now).unwrap();
    let Request::Create(creation) = request else { panic!("{request:?}") };
    assert_eq!(creation.count, 3);
    events.record(now, occurrence("a", "Broken", "no"));
    events.finish(now, key, Outcome::Written);
    let (_, request) = events.next(now + PACE).unwrap();
    assert!(matches!(request, Request::CountUp(CountUp { count: 4, .. })), "{request:?}");
}

#[test]
fn from_the_tenth_on_similar_messages_share_an_event_that_has_the_newest() {
    let (mut events, now) = (Correlator::default(), Instant::now());
    for number in 0..13 {
        events.record(now, occurrence("a", "Broken", &format!("no {number}")));
    }
    events.record(now, occurrence("a", "Broken", "no 3"));
    let created = written(&mut events, now);
    assert_eq!(created.len(), 10);
    let combined = created.last().unwrap();
    assert_eq!((combined.1, combined.2.as_str()), (4, "(combined from similar events): no 12"));
    assert_eq!(created[3].1, 2, "a message that has its event is counted there");
    events.record(now + PACE, occurrence("a", "Broken", "no 13"));
    let counted = written(&mut events, now + PACE);
    assert_eq!((counted[0].1, counted[0].2.as_str()), (5, "(combined from similar events): no 13"));
}

#[test]
fn an_object_with_too_many_events_is_held_back_but_never_the_first_of_a_kind_nor_a_count() {
    let (mut events, now) = (Correlator::default(), Instant::now());
    for number in 0..BURST {
        events.record(now, occurrence("a", &format!("Reason{}", number / 5), &format!("no {number}")));
    }
    assert_eq!(written(&mut events, now).len(), usize::try_from(BURST).unwrap());
    events.record(now, occurrence("a", "Reason0", "one more"));
    assert_eq!(events.losses(), Losses { lost: 0, suppressed: 1 });
    events.record(now, occurrence("a", "New", "of its own kind"));
    events.record(now, occurrence("b", "Reason0", "of another object"));
    assert_eq!(written(&mut events, now).len(), 2);
    // The count has to wait until the object may have a request again.
    events.record(now, occurrence("a", "Reason0", "no 0"));
    assert!(written(&mut events, now + PACE).is_empty());
    assert_eq!(events.next(now + PACE).unwrap_err(), Some(now + REFILL));
    assert_eq!(written(&mut events, now + REFILL)[0].1, 2);
    assert_eq!(events.take_losses(), Losses { lost: 0, suppressed: 1 });
    assert!(!events.losses().any());
}

#[test]
fn a_request_without_an_answer_is_repeated_under_the_same_name_and_lost_in_the_end() {
    let (mut events, mut now) = (Correlator::default(), Instant::now());
    events.record(now, occurrence("a", "Broken", "no"));
    let mut names = BTreeSet::new();
    for _ in 0..TRIES {
        let (key, request) = events.next(now).unwrap();
        let Request::Create(creation) = request else { panic!("{request:?}") };
        names.insert(creation.name);
        events.finish(now, key, Outcome::Unanswered);
        now += LONGEST_RETRY;
    }
    assert_eq!(names.len(), 1);
    assert_eq!(events.losses(), Losses { lost: 1, suppressed: 0 });
    assert!(written(&mut events, now).is_empty());
}

#[test]
fn an_event_is_created_anew_when_it_was_refused_or_is_old() {
    let (mut events, now) = (Correlator::default(), Instant::now());
    events.record(now, occurrence("a", "Broken", "no"));
    let (key, _) = events.next(now).unwrap();
    events.finish(now, key, Outcome::Refused);
    assert!(written(&mut events, now).is_empty());
    events.record(now, occurrence("a", "Broken", "no"));
    let first = written(&mut events, now);
    events.record(now + SAME, occurrence("a", "Broken", "no"));
    let second = written(&mut events, now + SAME);
    assert_eq!((first[0].1, second[0].1), (1, 1));
    assert_ne!(first[0].0, second[0].0);
}

#[test]
fn what_waits_is_written_at_once_when_nothing_more_comes() {
    let (mut events, now) = (Correlator::default(), Instant::now());
    events.record(now, occurrence("a", "Broken", "no"));
    written(&mut events, now);
    events.record(now, occurrence("a", "Broken", "no"));
    events.close();
    assert_eq!(written(&mut events, now)[0].1, 2);
    assert_eq!(events.next(now).unwrap_err(), None);
}

#[test]
fn memory_is_bounded_and_given_back() {
    let (mut events, now) = (Correlator::default(), Instant::now());
    for number in 0..KINDS + 1000 {
        events.record(now, occurrence(&number.to_string(), "Broken", "no"));
        written(&mut events, now);
    }
    assert!(events.entries.len() <= REMEMBERED && events.written.len() <= REMEMBERED);
    assert!(events.similar.len() <= KINDS && events.objects.len() <= KINDS);
    assert!(!events.losses().any());
    assert_eq!(events.next(now + SAME * 2).unwrap_err(), None);
    assert_eq!((events.entries.capacity(), events.similar.capacity()), (0, 0));
}
