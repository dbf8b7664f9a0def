//! The table of checks, and how a run goes through it.

mod concurrency;
mod crash;
mod data;
mod errors;
mod extras;
mod idempotency;
mod identity;
mod leaks;
mod lifecycle;
mod limits;
mod lists;
mod node_errors;
mod staging;

use std::io;
use std::pin::Pin;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use berth_csi::{ControllerCapability, GroupCapability, NodeCapability, PluginService};

use crate::Options;
use crate::report::{CallRecord, CheckResult, Report, Status};
use crate::rules::{RULES, Rule};
use crate::session::{Fault, Outcome, Session};

/// How long one check may take, whatever it does.
const CHECK_TIMEOUT: Duration = Duration::from_secs(300);

type Running<'a> = Pin<Box<dyn Future<Output = Outcome> + Send + 'a>>;

/// One row of the table.
pub(crate) struct Check {
    pub(crate) rule: Rule,
    needs: &'static [Need],
    run: for<'a> fn(&'a Session) -> Running<'a>,
}

/// What a check cannot do without.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Need {
    Controller(ControllerCapability),
    Node(NodeCapability),
    Group(GroupCapability),
    Service(PluginService),
    /// The driver announces ControllerPublishVolume.
    Attach,
    /// The driver has volumes, and a node to use them on.
    Volumes,
    /// The driver was started here, so that it can be killed.
    Program,
    /// The driver's process can be inspected.
    Sight,
    /// The volumes of this run are filesystems.
    Filesystem,
    /// Volumes are block devices.
    Block,
    /// Parameters that can be changed are given.
    MutableParameters,
}

impl Need {
    /// Why it is not there; `None` if it is.
    fn missing(self, session: &Session) -> Option<String> {
        let identity = &session.identity;
        let announced = |is_there: bool, name: &str| (!is_there).then(|| format!("{name} is not announced"));
        match self {
            Self::Controller(capability) => announced(identity.can(capability), capability.as_str_name()),
            Self::Node(capability) => {
                announced(identity.node.contains(&capability), capability.as_str_name())
            }
            Self::Group(capability) => {
                announced(identity.group.contains(&capability), capability.as_str_name())
            }
            Self::Service(service) => announced(identity.services.contains(&service), service.as_str_name()),
            Self::Attach => announced(identity.attaches(), "PUBLISH_UNPUBLISH_VOLUME"),
            Self::Volumes => {
                if session.node.node_id.is_empty() {
                    return Some("NodeGetInfo does not answer with a node".to_owned());
                }
                announced(identity.can(ControllerCapability::CreateDeleteVolume), "CREATE_DELETE_VOLUME")
            }
            Self::Program => (!session.driver.is_own()).then(|| {
                "the driver was not started here (-- ./my-driver), so it cannot be killed".to_owned()
            }),
            Self::Sight => (session.driver.mounts().is_none() || session.driver.root().is_none())
                .then(|| "the driver's process cannot be inspected from here".to_owned()),
            Self::Filesystem => {
                session.options.block.then(|| "volumes are block devices in this run".to_owned())
            }
            Self::Block => {
                (!session.options.block).then(|| "volumes are filesystems in this run (--block)".to_owned())
            }
            Self::MutableParameters => session
                .options
                .mutable_parameters
                .is_empty()
                .then(|| "no parameter to change is given (--mutable-parameter KEY=VALUE)".to_owned()),
        }
    }
}

/// Declares rows: id, level, section, rule, what to do, needs, code.
macro_rules! checks {
    ($($id:literal $level:ident $section:literal: $rule:literal; $advice:literal; [$($need:expr),*] $run:expr;)*) => {
        pub(super) static CHECKS: &[crate::checks::Check] = &[$(crate::checks::Check {
            rule: crate::rules::Rule {
                id: $id,
                level: crate::rules::Level::$level,
                section: std::borrow::Cow::Borrowed($section),
                rule: std::borrow::Cow::Borrowed($rule),
                advice: std::borrow::Cow::Borrowed($advice),
            },
            needs: &[$($need),*],
            run: |session| Box::pin($run(session)),
        }),*];
    };
}
pub(crate) use checks;

/// Every check, in the order of the report.
pub(crate) fn all() -> &'static [&'static Check] {
    static ALL: LazyLock<Vec<&'static Check>> = LazyLock::new(|| {
        let groups = [
            identity::CHECKS,
            lifecycle::CHECKS,
            errors::CHECKS,
            node_errors::CHECKS,
            limits::CHECKS,
            idempotency::CHECKS,
            staging::CHECKS,
            data::CHECKS,
            lists::CHECKS,
            extras::CHECKS,
            concurrency::CHECKS,
            crash::CHECKS,
            leaks::CHECKS,
        ];
        groups.into_iter().flatten().collect()
    });
    &ALL
}

pub(crate) async fn run(options: Options, mut heard: impl FnMut(&CheckResult)) -> io::Result<Report> {
    let session = Session::open(options).await?;
    let mut results = Vec::new();
    for check in all().iter().filter(|check| session.options.selects(check.rule.id)) {
        let result = one(&session, check).await;
        // Some only provoke what the rules of one call then judge.
        if let Some(rule) = RULES.iter().find(|rule| rule.id == check.rule.id) {
            match result.status {
                Status::Passed => session.judge_as(rule, None),
                Status::Failed => session.judge_as(rule, Some(result.detail)),
                Status::NotRun => {}
            }
            continue;
        }
        heard(&result);
        results.push(result);
    }
    // What the calls of all checks showed, and so last.
    for rule in RULES.iter().filter(|rule| session.options.selects(rule.id)) {
        let (status, detail) = match session.judgement(rule.id) {
            Some(Ok(())) => (Status::Passed, String::new()),
            Some(Err(found)) => (Status::Failed, found),
            None => (Status::NotRun, "no call was made that it applies to".to_owned()),
        };
        let result =
            CheckResult { rule: (*rule).clone(), status, detail, calls: Vec::new(), milliseconds: 0 };
        heard(&result);
        results.push(result);
    }
    let report = Report { driver: session.identity.name.clone(), version: session.version.clone(), results };
    session.driver.stop();
    let _ = std::fs::remove_dir_all(session.directory());
    Ok(report)
}

async fn one(session: &Session, check: &Check) -> CheckResult {
    let begun = Instant::now();
    session.take_calls();
    let missing = check.needs.iter().find_map(|need| need.missing(session));
    let outcome = match missing {
        Some(why) => Err(Fault::NotRun(why)),
        None => match tokio::time::timeout(CHECK_TIMEOUT, (check.run)(session)).await {
            Ok(outcome) => outcome,
            Err(_) => Err(Fault::NotRun(format!("it took longer than {CHECK_TIMEOUT:?}"))),
        },
    };
    // A check of crashes may leave the driver dead.
    if session.driver.is_own() && session.driver.pid().is_none() {
        let _ = session.driver.run().await;
    }
    session.clean_up().await;
    let calls = session.take_calls();
    let (status, detail, calls): (_, _, Vec<CallRecord>) = match outcome {
        Ok(()) => (Status::Passed, String::new(), Vec::new()),
        Err(Fault::Broken(text)) => (Status::Failed, session.readable(&text), calls),
        Err(Fault::NotRun(text)) => (Status::NotRun, session.readable(&text), calls),
    };
    let milliseconds = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
    CheckResult { rule: check.rule.clone(), status, detail, calls, milliseconds }
}
