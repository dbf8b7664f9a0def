//! Stepping through calls: each waits before it is sent, until a person lets it go on, or answers it in the place of the driver.

use std::collections::VecDeque;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::messages::{HandAnswer, answer_by_hand, concerns_volumes};

/// Which calls wait before they are sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StepFilter {
    /// No call waits at all.
    Off,
    /// All that concern volumes.
    Volumes,
    /// Those of these methods.
    Methods(Vec<&'static str>),
}

impl StepFilter {
    /// Reads the names of methods; none means all calls that concern volumes.
    pub fn parse(names: &[String]) -> Result<Self, String> {
        if names.is_empty() {
            return Ok(Self::Volumes);
        }
        let method = |name: &String| {
            crate::messages::method_named(name).ok_or_else(|| format!("CSI has no call {name:?}"))
        };
        names.iter().map(method).collect::<Result<_, _>>().map(Self::Methods)
    }

    fn stops(&self, method: &str) -> bool {
        match self {
            Self::Off => false,
            Self::Volumes => concerns_volumes(method),
            Self::Methods(methods) => methods.contains(&method),
        }
    }
}

/// What becomes of a call that waited.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    Send,
    Answer(HandAnswer),
}

/// The calls that wait.
#[derive(Debug)]
pub(crate) struct Steps {
    filter: Mutex<StepFilter>,
    held: Mutex<VecDeque<Held>>,
}

#[derive(Debug)]
struct Held {
    method: String,
    request: Bytes,
    decision: oneshot::Sender<Decision>,
}

impl Steps {
    pub(crate) fn new(filter: StepFilter) -> Self {
        Self { filter: Mutex::new(filter), held: Mutex::default() }
    }

    /// Whether calls are stepped through.
    pub(crate) fn is_on(&self) -> bool {
        *self.filter.lock() != StepFilter::Off
    }

    /// Has a call wait if it is to; `announce` is called when it waits. `request` is the message without its frame.
    pub(crate) async fn pass(&self, method: &str, request: &Bytes, announce: impl FnOnce()) -> Decision {
        if !self.filter.lock().stops(method) {
            return Decision::Send;
        }
        let (decision, decided) = oneshot::channel();
        self.held.lock().push_back(Held { method: method.to_owned(), request: request.clone(), decision });
        announce();
        decided.await.unwrap_or(Decision::Send)
    }

    /// Sends the call that has waited longest; says whether there was one.
    pub(crate) fn next(&self) -> bool {
        let mut held = self.held.lock();
        while let Some(first) = held.pop_front() {
            // Its caller may have given up.
            if first.decision.send(Decision::Send).is_ok() {
                return true;
            }
        }
        false
    }

    /// Answers the call that has waited longest.
    pub(crate) fn answer(&self, text: &str) -> Result<(), String> {
        let mut held = self.held.lock();
        held.retain(|held| !held.decision.is_closed());
        let first = held.front().ok_or_else(|| "no call waits".to_owned())?;
        let answer = answer_by_hand(&first.method, &first.request, text)?;
        if let Some(first) = held.pop_front() {
            let _ = first.decision.send(Decision::Answer(answer));
        }
        Ok(())
    }

    /// Lets all calls go on, now and later.
    pub(crate) fn run_on(&self) {
        *self.filter.lock() = StepFilter::Off;
        while self.next() {}
    }

    /// Steps through all calls from now on.
    pub(crate) fn stop_each(&self) {
        *self.filter.lock() = StepFilter::Volumes;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    const PUBLISH: &str = "/csi.v1.Node/NodePublishVolume";

    #[tokio::test]
    async fn a_call_waits_until_it_is_sent_or_answered() {
        let steps = Arc::new(Steps::new(StepFilter::parse(&["NodePublish".to_owned()]).unwrap()));
        let request = Bytes::new();
        assert_eq!(
            steps.pass("/csi.v1.Identity/Probe", &request, || panic!("it waits")).await,
            Decision::Send
        );
        let call = async |steps: &Arc<Steps>| {
            let (steps, request) = (steps.clone(), request.clone());
            let (announce, announced) = oneshot::channel();
            let waiting = async move { steps.pass(PUBLISH, &request, || announce.send(()).unwrap()).await };
            let waiting = tokio::spawn(waiting);
            announced.await.unwrap();
            (waiting,)
        };
        let (waiting,) = call(&steps).await;
        assert!(steps.next() && !steps.next());
        assert_eq!(waiting.await.unwrap(), Decision::Send);
        let (waiting,) = call(&steps).await;
        assert!(steps.answer("WHAT").is_err(), "a mistake decides nothing");
        steps.answer("OK").unwrap();
        assert_eq!(waiting.await.unwrap(), Decision::Answer(HandAnswer::Message(Vec::new())));
        let (gone,) = call(&steps).await;
        gone.abort();
        let _ = gone.await;
        assert!(!steps.next(), "whose caller has given up waits no longer");
        let (waiting,) = call(&steps).await;
        steps.run_on();
        assert_eq!(waiting.await.unwrap(), Decision::Send);
        assert_eq!(steps.pass(PUBLISH, &request, || panic!("it waits")).await, Decision::Send);
    }

    #[test]
    fn names_are_checked() {
        assert_eq!(StepFilter::parse(&[]), Ok(StepFilter::Volumes));
        assert!(StepFilter::parse(&["Jump".to_owned()]).unwrap_err().contains("\"Jump\""));
    }
}
