//! Answers that are kept for a while: a call that comes again, because its connection broke before the answer arrived, gets the same
//! answer and is not done twice.
//!
//! A client sends such a call with the same number (xid) and the same bytes, from the same address.

use std::{
    collections::{HashMap, VecDeque},
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use parking_lot::{Condvar, Mutex};
use ring::digest;

/// How many answers are kept; each is a few hundred bytes.
const MOST: usize = 4096;
/// Clients repeat what was not answered long before this.
const KEPT: Duration = Duration::from_secs(240);

type Key = (IpAddr, [u8; 32]);

/// The answers to calls that must not be done twice.
#[derive(Default)]
pub(crate) struct Replies(Mutex<Kept>);

#[derive(Default)]
struct Kept {
    answers: HashMap<Key, Arc<Answer>>,
    by_age: VecDeque<(Instant, Key)>,
}

#[derive(Default)]
struct Answer {
    bytes: Mutex<Option<Vec<Bytes>>>,
    is_there: Condvar,
}

impl Replies {
    /// Answers a call: does it, or waits for the answer of the one that was the same.
    pub(crate) fn once(
        &self,
        from: IpAddr,
        record: &Bytes,
        perform: impl FnOnce() -> Vec<Bytes>,
    ) -> Vec<Bytes> {
        let hash = digest::digest(&digest::SHA256, record);
        let mut key: Key = (from, [0; 32]);
        key.1.copy_from_slice(hash.as_ref());
        let (answer, is_new) = self.0.lock().find(key);
        if is_new {
            let mut given = Given { answer, bytes: None };
            given.bytes = Some(perform());
            return given.bytes.clone().unwrap_or_default();
        }
        let mut bytes = answer.bytes.lock();
        while bytes.is_none() {
            answer.is_there.wait(&mut bytes);
        }
        bytes.clone().unwrap_or_default()
    }
}

impl Kept {
    /// The place for an answer, and whether it is new.
    fn find(&mut self, key: Key) -> (Arc<Answer>, bool) {
        let now = Instant::now();
        while let Some((since, oldest)) = self.by_age.front()
            && (self.by_age.len() >= MOST || now.duration_since(*since) > KEPT)
        {
            self.answers.remove(oldest);
            self.by_age.pop_front();
        }
        if let Some(answer) = self.answers.get(&key) {
            return (answer.clone(), false);
        }
        let answer = Arc::new(Answer::default());
        self.answers.insert(key, answer.clone());
        self.by_age.push_back((now, key));
        (answer, true)
    }
}

/// Hands the answer to whoever waits, also if there is none because the work panicked.
struct Given {
    answer: Arc<Answer>,
    bytes: Option<Vec<Bytes>>,
}

impl Drop for Given {
    fn drop(&mut self) {
        *self.answer.bytes.lock() = Some(self.bytes.take().unwrap_or_default());
        self.answer.is_there.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn a_call_that_comes_again_is_answered_and_not_done() {
        let (replies, done) = (Replies::default(), AtomicU32::new(0));
        let call = |from: &str, record: &'static [u8]| {
            let answered = replies.once(from.parse().unwrap(), &Bytes::from_static(record), || {
                let number = done.fetch_add(1, Ordering::SeqCst);
                vec![Bytes::copy_from_slice(&number.to_be_bytes())]
            });
            answered.concat()
        };
        let first = call("127.0.0.1", b"remove a");
        assert_eq!(call("127.0.0.1", b"remove a"), first);
        assert_ne!(call("127.0.0.1", b"remove b"), first);
        assert_ne!(call("127.0.0.2", b"remove a"), first);
        assert_eq!(done.load(Ordering::SeqCst), 3);
    }

    #[test]
    fn whoever_comes_while_it_is_done_waits_for_the_answer() {
        let (replies, record) = (Replies::default(), Bytes::from_static(b"remove"));
        let from: IpAddr = "127.0.0.1".parse().unwrap();
        let (begun, has_begun) = std::sync::mpsc::channel();
        let (go, may_go) = std::sync::mpsc::channel::<()>();
        std::thread::scope(|scope| {
            let (replies, record) = (&replies, &record);
            let first = scope.spawn(move || {
                replies.once(from, record, || {
                    begun.send(()).unwrap();
                    may_go.recv().unwrap();
                    vec![Bytes::from_static(b"done")]
                })
            });
            has_begun.recv().unwrap();
            let again = scope.spawn(|| replies.once(from, record, || panic!("it is done twice")));
            go.send(()).unwrap();
            assert_eq!(first.join().unwrap(), again.join().unwrap());
        });
    }

    #[test]
    fn old_answers_make_room() {
        let replies = Replies::default();
        for number in 0..2 * MOST {
            let record = Bytes::copy_from_slice(&number.to_be_bytes());
            replies.once("::1".parse().unwrap(), &record, Vec::new);
        }
        let kept = replies.0.lock();
        assert!(kept.answers.len() <= MOST && kept.by_age.len() <= MOST);
    }
}
