//! Candidates for a Lease on the embedded API server, under a clock that the tests turn.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use berth_kube::leader::{Elector, Invalid, Options};
use berth_testkit::EmbeddedServer;
use http::Request;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{Api, PostParams};
use kube::client::Body;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tower::Service as _;

const NAME: &str = "external-attacher-leader-berth";

/// What becomes of a candidate's requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Link {
    /// Requests arrive and are answered.
    Open,
    /// Requests are lost on their way.
    Cut,
    /// They arrive, and the answers get lost.
    Mute,
    /// They arrive long after the candidate has given up, and the answers get lost.
    Late,
}

/// An API server, who works by its Lease, and whatever happened that must not.
#[derive(Clone)]
struct Stage {
    server: Arc<EmbeddedServer>,
    state: Arc<Mutex<State>>,
    leader: watch::Sender<Option<String>>,
}

#[derive(Default)]
struct State {
    working: Vec<String>,
    terms: Vec<(String, i32)>,
    wrong: Vec<String>,
}

impl Stage {
    async fn set() -> Self {
        tokio::time::resume();
        let server = Arc::new(EmbeddedServer::start().await);
        tokio::time::pause();
        Self { server, state: Arc::default(), leader: watch::Sender::new(None) }
    }

    /// A client whose requests go this link. No time passes while the server works, or the clock would run ahead of it.
    fn client(&self, link: &watch::Receiver<Link>) -> kube::Client {
        let (server, link) = (self.server.api.clone(), link.clone());
        let service = tower::service_fn(move |request: Request<Body>| {
            let (mut server, link) = (server.clone(), *link.borrow());
            async move {
                if link == Link::Cut {
                    std::future::pending::<()>().await;
                }
                let answer = tokio::spawn(async move {
                    if link == Link::Late {
                        sleep(Duration::from_secs(12)).await;
                    }
                    let (done, wait) = std::sync::mpsc::channel::<()>();
                    let still = tokio::task::spawn_blocking(move || wait.recv().is_ok());
                    let answer = server.call(request).await;
                    drop(done);
                    still.await.unwrap();
                    answer
                });
                if link != Link::Open {
                    std::future::pending::<()>().await;
                }
                Ok::<_, Infallible>(answer.await.unwrap().unwrap())
            }
        });
        kube::Client::new(service, "default")
    }

    fn leases(&self) -> Api<Lease> {
        Api::namespaced(self.client(&watch::Sender::new(Link::Open).subscribe()), "default")
    }

    async fn lease(&self) -> LeaseSpec {
        self.leases().get(NAME).await.unwrap().spec.unwrap()
    }

    fn candidate(&self, name: &str) -> Candidate {
        self.candidate_who(name, true)
    }

    /// A candidate whose work ends when told to, or never by itself.
    fn candidate_who(&self, name: &str, obeys: bool) -> Candidate {
        self.run(Options::new("default", NAME, name), obeys)
    }

    /// A candidate that looks for rivals.
    fn candidate_beside(&self, name: &str, rivals: &[&str]) -> Candidate {
        self.candidate_in("default", name, rivals)
    }

    fn candidate_in(&self, namespace: &str, name: &str, rivals: &[&str]) -> Candidate {
        let rivals = rivals.iter().map(|&rival| rival.to_owned()).collect();
        self.run(Options { rivals, ..Options::new(namespace, NAME, name) }, true)
    }

    fn run(&self, options: Options, obeys: bool) -> Candidate {
        let link = watch::Sender::new(Link::Open);
        let labels = BTreeMap::from([("app".to_owned(), "berth".to_owned())]);
        let (name, namespace) = (options.identity.clone(), options.namespace.clone());
        let options = Options { labels, ..options };
        let elector = Arc::new(Elector::new(self.client(&link.subscribe()), options).unwrap());
        let stop = CancellationToken::new();
        let (stage, shutdown) = (self.clone(), stop.clone());
        let leading = elector.leadership();
        let task = tokio::spawn(async move {
            let lead = |term: CancellationToken| {
                let (stage, name, namespace) = (stage.clone(), name.clone(), namespace.clone());
                async move {
                    let _working = Working::begin(&stage, &namespace, &name).await;
                    if obeys { term.cancelled().await } else { std::future::pending().await }
                }
            };
            elector.run(shutdown, lead).await;
        });
        Candidate { link, stop, task, leading }
    }

    async fn wait_for(&self, wanted: impl Fn(&str) -> bool) -> String {
        let mut leader = self.leader.subscribe();
        let found =
            timeout(Duration::from_secs(120), leader.wait_for(|now| now.as_deref().is_some_and(&wanted)));
        found.await.expect("somebody leads within two minutes").unwrap().clone().unwrap()
    }

    fn check(&self) {
        let state = self.state.lock();
        assert!(state.wrong.is_empty(), "{:#?}", state.wrong);
    }
}

struct Candidate {
    link: watch::Sender<Link>,
    stop: CancellationToken,
    task: JoinHandle<()>,
    leading: watch::Receiver<berth_kube::leader::Leadership>,
}

/// One at work: nobody else may be, and the Lease must say so in a later term than ever before.
struct Working(Stage, String);

impl Working {
    async fn begin(stage: &Stage, namespace: &str, name: &str) -> Self {
        let leases: Api<Lease> = Api::namespaced(stage.leases().into_client(), namespace);
        let lease = leases.get(NAME).await.unwrap().spec.unwrap();
        let mut reported = stage.state.lock();
        if lease.holder_identity.as_deref() != Some(name) {
            reported.wrong.push(format!("{name} works with the lease of {:?}", lease.holder_identity));
        }
        if !reported.working.is_empty() {
            let others = reported.working.clone();
            reported.wrong.push(format!("{name} works while {others:?} does"));
        }
        let term = lease.lease_transitions.unwrap_or_default();
        if let Some((before, last)) = reported.terms.last()
            && (term < *last || (term == *last && before != name))
        {
            let text = format!("{name} works in term {term} after {before} in {last}");
            reported.wrong.push(text);
        }
        reported.terms.push((name.to_owned(), term));
        reported.working.push(name.to_owned());
        stage.leader.send_replace(Some(name.to_owned()));
        Self(stage.clone(), name.to_owned())
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        self.0.state.lock().working.retain(|name| *name != self.1);
        self.0.leader.send_if_modified(|leader| leader.take_if(|leader| *leader == self.1).is_some());
    }
}

#[tokio::test(start_paused = true)]
async fn of_three_that_start_together_one_leads_and_keeps_leading() {
    let stage = Stage::set().await;
    let candidates = ["a", "b", "c"].map(|name| stage.candidate(name));
    let leader = stage.wait_for(|_| true).await;
    let before = stage.lease().await;
    sleep(Duration::from_secs(120)).await;
    let after = stage.lease().await;
    assert_eq!(after.holder_identity, Some(leader));
    assert_eq!((after.lease_transitions, after.lease_duration_seconds), (Some(0), Some(15)));
    assert_eq!(after.acquire_time, before.acquire_time);
    assert!(after.renew_time > before.renew_time);
    assert_eq!(candidates.iter().filter(|candidate| candidate.leading.borrow().leading).count(), 1);
    let labels = stage.leases().get(NAME).await.unwrap().metadata.labels.unwrap();
    assert_eq!(labels["app"], "berth");
    stage.check();
}

#[tokio::test(start_paused = true)]
async fn one_that_is_told_to_stop_gives_the_lease_back_and_the_next_need_not_wait_for_it_to_expire() {
    let stage = Stage::set().await;
    let first = stage.candidate("a");
    stage.wait_for(|name| name == "a").await;
    let _second = stage.candidate("b");
    sleep(Duration::from_secs(1)).await;
    let reported = Instant::now();
    first.stop.cancel();
    timeout(Duration::from_secs(1), first.task).await.expect("it stops at once").unwrap();
    stage.wait_for(|name| name == "b").await;
    assert!(reported.elapsed() <= Duration::from_secs(11), "it took {:?}", reported.elapsed());
    assert_eq!(stage.lease().await.lease_transitions, Some(1));
    stage.check();
}

#[tokio::test(start_paused = true)]
async fn the_lease_is_renewed_while_work_under_way_is_finished() {
    let stage = Stage::set().await;
    let stubborn = stage.candidate_who("a", false);
    stage.wait_for(|name| name == "a").await;
    let _second = stage.candidate("b");
    stubborn.stop.cancel();
    sleep(Duration::from_secs(300)).await;
    assert_eq!(stage.lease().await.holder_identity.as_deref(), Some("a"));
    assert!(!stubborn.task.is_finished());
    stage.check();
}

#[tokio::test(start_paused = true)]
async fn one_that_is_cut_off_stops_before_another_begins_and_stands_by_when_it_is_back() {
    for link in [Link::Cut, Link::Mute, Link::Late] {
        for obeys in [true, false] {
            let stage = Stage::set().await;
            let first = stage.candidate_who("a", obeys);
            stage.wait_for(|name| name == "a").await;
            let _others = ["b", "c"].map(|name| stage.candidate(name));
            sleep(Duration::from_secs(7)).await;
            let cut = Instant::now();
            first.link.send_replace(link);
            let next = stage.wait_for(|name| name != "a").await;
            let took = cut.elapsed();
            // Late ones keep the lease alive from beyond the cut, once.
            let longest = if link == Link::Cut { 31 } else { 60 };
            assert!(
                took > Duration::from_secs(5) && took < Duration::from_secs(longest),
                "{link:?}: after {took:?}"
            );
            assert!(!first.leading.borrow().leading);
            assert!(!first.task.is_finished(), "it gave up for good");
            first.link.send_replace(Link::Open);
            sleep(Duration::from_secs(100)).await;
            assert_eq!(stage.lease().await.holder_identity, Some(next), "{link:?}");
            stage.check();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn work_that_does_not_obey_is_cut_short_before_the_lease_expires() {
    let stage = Stage::set().await;
    let alone = stage.candidate_who("a", false);
    stage.wait_for(|name| name == "a").await;
    let cut = Instant::now();
    alone.link.send_replace(Link::Cut);
    let mut leader = stage.leader.subscribe();
    leader.wait_for(Option::is_none).await.unwrap();
    let took = cut.elapsed();
    assert!(took >= Duration::from_secs(10) && took < Duration::from_secs(14), "after {took:?}");
    alone.link.send_replace(Link::Open);
    stage.wait_for(|name| name == "a").await;
    stage.check();
}

#[tokio::test(start_paused = true)]
async fn one_whose_lease_is_taken_by_an_outsider_stops_at_its_next_renewal() {
    let stage = Stage::set().await;
    let _candidate = stage.candidate("a");
    stage.wait_for(|name| name == "a").await;
    let mut lease = stage.leases().get(NAME).await.unwrap();
    let spec = lease.spec.as_mut().unwrap();
    spec.holder_identity = Some("outsider".to_owned());
    spec.lease_transitions = Some(7);
    stage.leases().replace(NAME, &PostParams::default(), &lease).await.unwrap();
    let taken = Instant::now();
    let mut leader = stage.leader.subscribe();
    leader.wait_for(Option::is_none).await.unwrap();
    assert!(taken.elapsed() <= Duration::from_millis(5_100), "after {:?}", taken.elapsed());
    stage.wait_for(|name| name == "a").await;
    assert!(taken.elapsed() >= Duration::from_secs(15), "it did not respect the outsider's lease");
    assert_eq!(stage.lease().await.lease_transitions, Some(8));
    stage.check();
}

#[tokio::test(start_paused = true)]
async fn the_times_in_a_lease_are_not_trusted_whatever_the_holders_clock_says() {
    for time in ["2001-01-01T00:00:00Z", "2100-01-01T00:00:00Z"] {
        let stage = Stage::set().await;
        let time: Timestamp = time.parse().unwrap();
        let mut lease = Lease::default();
        lease.metadata.name = Some(NAME.to_owned());
        lease.spec = Some(LeaseSpec {
            holder_identity: Some("gone".to_owned()),
            lease_duration_seconds: Some(30),
            renew_time: Some(MicroTime(time)),
            ..LeaseSpec::default()
        });
        stage.leases().create(&PostParams::default(), &lease).await.unwrap();
        let begun = Instant::now();
        let _candidate = stage.candidate("a");
        stage.wait_for(|name| name == "a").await;
        let took = begun.elapsed();
        assert!(
            took >= Duration::from_secs(30) && took <= Duration::from_secs(42),
            "with {time} it took {took:?}"
        );
        stage.check();
    }
}

#[tokio::test(start_paused = true)]
async fn one_that_comes_back_under_its_name_goes_on_where_it_was_killed() {
    let stage = Stage::set().await;
    let killed = stage.candidate("a");
    stage.wait_for(|name| name == "a").await;
    killed.task.abort();
    let _ = killed.task.await;
    let begun = Instant::now();
    let _again = stage.candidate("a");
    stage.wait_for(|name| name == "a").await;
    assert!(begun.elapsed() < Duration::from_secs(1), "it took {:?}", begun.elapsed());
    assert_eq!(stage.lease().await.lease_transitions, Some(0));
    stage.check();
}

#[tokio::test(start_paused = true)]
async fn there_are_never_two_whatever_happens_to_their_ways() {
    let stage = Stage::set().await;
    let candidates =
        [("a", true), ("b", false), ("c", true)].map(|(name, obeys)| stage.candidate_who(name, obeys));
    // A fixed sequence that looks like none.
    let mut dice = 20_261_116_u64;
    for _ in 0..150 {
        dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let throw = dice >> 33;
        let link =
            [Link::Open, Link::Cut, Link::Mute, Link::Late, Link::Open][usize::try_from(throw % 5).unwrap()];
        candidates[usize::try_from(throw / 5 % 3).unwrap()].link.send_replace(link);
        sleep(Duration::from_millis(throw / 15 % 20_000)).await;
        stage.check();
    }
    for candidate in &candidates {
        candidate.link.send_replace(Link::Open);
    }
    stage.wait_for(|_| true).await;
    let terms = stage.state.lock().terms.clone();
    assert!(terms.len() > 10, "too little happened: {terms:?}");
    stage.check();
}

/// Writes a holder into the Lease of another namespace, as a controller does that looks only there.
async fn rival(stage: &Stage, name: &str, holder: &str, transitions: i32) {
    let namespaces: Api<Namespace> = Api::all(stage.leases().into_client());
    let mut namespace = Namespace::default();
    namespace.metadata.name = Some("kube-system".to_owned());
    let _ = namespaces.create(&PostParams::default(), &namespace).await;
    let leases: Api<Lease> = Api::namespaced(stage.leases().into_client(), "kube-system");
    let mut lease = leases.get_opt(name).await.unwrap().unwrap_or_default();
    lease.metadata.name = Some(name.to_owned());
    lease.spec = Some(LeaseSpec {
        holder_identity: Some(holder.to_owned()),
        lease_duration_seconds: Some(15),
        lease_transitions: Some(transitions),
        ..LeaseSpec::default()
    });
    if lease.metadata.resource_version.is_some() {
        leases.replace(name, &PostParams::default(), &lease).await.unwrap();
    } else {
        leases.create(&PostParams::default(), &lease).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_candidate_stands_by_while_a_rival_in_another_namespace_is_alive_and_leads_when_it_is_gone() {
    for name in [NAME, "upstreams-lease"] {
        let stage = Stage::set().await;
        rival(&stage, name, "upstream", 0).await;
        let _candidate = stage.candidate_beside("a", &[NAME, "upstreams-lease"]);
        for renewal in 1..10 {
            sleep(Duration::from_secs(5)).await;
            rival(&stage, name, "upstream", renewal).await;
            assert_eq!(*stage.leader.borrow(), None, "{name}");
        }
        let silent = Instant::now();
        stage.wait_for(|name| name == "a").await;
        assert!(silent.elapsed() >= Duration::from_secs(15), "after {:?}", silent.elapsed());
        stage.check();
    }
}

#[tokio::test(start_paused = true)]
async fn a_leader_gives_way_to_a_rival_that_starts_to_lead_and_gives_its_lease_back() {
    let stage = Stage::set().await;
    let candidate = stage.candidate_beside("a", &[NAME]);
    stage.wait_for(|name| name == "a").await;
    rival(&stage, NAME, "upstream", 0).await;
    let begun = Instant::now();
    let mut leader = stage.leader.subscribe();
    leader.wait_for(Option::is_none).await.unwrap();
    assert!(begun.elapsed() <= Duration::from_millis(5_100), "after {:?}", begun.elapsed());
    sleep(Duration::from_secs(1)).await;
    assert_eq!(stage.lease().await.holder_identity.as_deref(), Some(""), "it is given back");
    assert!(!candidate.leading.borrow().leading);
    // A rival that stops in order leaves no holder.
    rival(&stage, NAME, "", 1).await;
    stage.wait_for(|name| name == "a").await;
    stage.check();
}

#[tokio::test(start_paused = true)]
async fn of_two_in_different_namespaces_that_look_for_each_other_one_leads() {
    let stage = Stage::set().await;
    rival(&stage, "any", "", 0).await;
    let _here = stage.candidate_in("default", "a", &[NAME]);
    let _there = stage.candidate_in("kube-system", "b", &[NAME]);
    stage.wait_for(|_| true).await;
    let mut changes = stage.leader.subscribe();
    let leader = changes.borrow_and_update().clone();
    sleep(Duration::from_secs(300)).await;
    assert_eq!(*stage.leader.borrow(), leader);
    assert!(!changes.has_changed().unwrap(), "leadership stays where it is");
    stage.check();
}

#[test]
fn periods_that_would_let_two_work_at_the_same_time_are_refused() {
    let client = || kube::Client::new(tower::service_fn(refuse), "default");
    let seconds = Duration::from_secs;
    let with = |lease, renew, retry| {
        let options = Options { lease, renew, retry, ..Options::new("default", NAME, "a") };
        tokio::runtime::Runtime::new().unwrap().block_on(async { Elector::new(client(), options).err() })
    };
    assert_eq!(with(seconds(15), seconds(10), seconds(5)), None);
    assert_eq!(
        with(seconds(10), seconds(10), seconds(5)),
        Some(Invalid::Renew { lease: seconds(10), renew: seconds(10) })
    );
    assert_eq!(
        with(seconds(15), seconds(6), seconds(5)),
        Some(Invalid::Retry { renew: seconds(6), retry: seconds(5) })
    );
    let short = Duration::from_millis(900);
    assert_eq!(with(short, seconds(10), seconds(5)), Some(Invalid::Lease(short)));
}

async fn refuse(_: Request<Body>) -> Result<http::Response<Body>, Infallible> {
    Ok(http::Response::new(Body::empty()))
}
