//! `berth explain KIND/NAME`: an object's timeline, and for one that is stuck, why and what to do.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use berth_kube::Key;
use berth_ui::ClusterState;
use berth_ui::explain::{Explanation, Kind, Moment, Subject};
use clap::Args as ClapArgs;
use jiff::Timestamp;

use crate::machine::ClusterArgs;
use crate::timeline::{self, Step};

/// Show what happened to an object of storage, and what it waits for.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Exit status: 0 no problems, 1 error, 2 wrong command line, 3 stuck")]
pub(crate) struct Args {
    /// What to explain: pvc, pv, pod, volumesnapshot, volumesnapshotcontent, volumeattachment, sc, node or csidriver, and its name
    #[arg(value_name = "KIND/NAME")]
    what: String,

    /// The namespace of a claim, pod or snapshot
    #[arg(long, short = 'n', default_value = "default")]
    namespace: String,

    #[command(flatten)]
    cluster: ClusterArgs,
}

/// The exit status for an object that is stuck: a script can distinguish it from an error (1) and a wrong command line (2).
const STUCK: u8 = 3;

/// Prints the explanation; the exit status says whether the object is stuck.
pub(crate) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let (kind, name) = parse(&args.what)?;
    let (cluster, data_dir) = args.cluster.connect().await?;
    let subject = Subject::new(kind, &args.namespace, name);
    // Whoever asks about one object wants to know what it waits for, however short.
    let state = ClusterState { patience: Duration::ZERO, ..subject.read(&cluster).await? };
    let Some(explanation) = subject.explain(&state) else { bail!("{}", missing(&subject, &state)) };
    let steps =
        data_dir.map_or_else(Vec::new, |dir| timeline::read(&dir, |step| concerns(&explanation, step)));
    for line in text(&explanation, &steps).lines() {
        // Messages of others must not change the terminal.
        println!("{}", berth_ui::printable(line));
    }
    Ok(if berth_ui::diagnose::needs_a_person(&explanation.findings) {
        ExitCode::from(STUCK)
    } else {
        ExitCode::SUCCESS
    })
}

fn parse(what: &str) -> anyhow::Result<(Kind, &str)> {
    let Some((kind, name)) = what.split_once('/') else {
        bail!("{what:?} names no kind: write pvc/{what}, pv/{what} or pod/{what}");
    };
    let Some(kind) = Kind::from_word(kind) else {
        bail!(
            "there is nothing to explain about a {kind}; pvc, pv, pod, volumesnapshot, volumesnapshotcontent, \
             volumeattachment, sc, node and csidriver can be explained"
        );
    };
    if name.is_empty() {
        bail!("the name is missing after {what}");
    }
    Ok((kind, name))
}

fn missing(subject: &Subject, state: &ClusterState) -> String {
    let Key { namespace, name } = &subject.key;
    let word = subject.kind.word();
    if let Some(unreadable) =
        state.unreadable.iter().find(|unreadable| unreadable.kind == subject.kind.name())
    {
        return format!("cannot read the {word} {name}: {}", unreadable.why);
    }
    if namespace.is_empty() {
        format!("there is no {word} {name}")
    } else {
        format!("there is no {word} {name} in the namespace {namespace}")
    }
}

/// Whether a step belongs to the object, or to those that it is used with.
pub(crate) fn concerns(explanation: &Explanation, step: &Step) -> bool {
    explanation.volumes.contains(&step.volume)
        || explanation.claims.contains(&step.claim)
        || explanation.pods.contains(&step.pod)
}

fn text(explanation: &Explanation, steps: &[Step]) -> String {
    let mut lines = vec![explanation.headline.clone(), String::new()];
    let rows = rows(&explanation.moments, steps);
    if !rows.is_empty() {
        lines.extend(rows);
        lines.push(String::new());
    }
    for finding in &explanation.findings {
        if finding.severity.needs_a_person() {
            lines.push(format!("Stuck: {}", finding.cause));
            lines.push(format!("What to do: {}", finding.what_to_do));
            lines.extend(finding.command.iter().map(|command| format!("Command: {command}")));
        } else {
            lines.push(format!("Note: {}", finding.cause));
        }
        lines.extend(finding.evidence.iter().map(|fact| format!("Evidence: {fact}")));
    }
    if explanation.findings.is_empty() {
        lines.push(explanation.waits_for.clone().unwrap_or_else(|| "No problems found.".to_owned()));
    }
    lines.push(String::new());
    lines.join("\n")
}

/// One line per step of the timeline and per time that an object records, in the order in which they happened.
///
/// A step's time is exact, and counts from the beginning of the first step. An object's time is known to the second, so it
/// is shown in whole seconds, and within its second it comes after the steps that it must have followed.
fn rows(moments: &[Moment], steps: &[Step]) -> Vec<String> {
    let begin = |step: &Step| {
        let took = i128::from(step.duration_us) * 1000;
        Timestamp::from_nanosecond(step.time.as_nanosecond() - took).unwrap_or(step.time)
    };
    let Some(first) =
        steps.iter().map(begin).min().or_else(|| moments.iter().map(|moment| moment.time).min())
    else {
        return Vec::new();
    };
    let mut rows: Vec<(Timestamp, String)> = moments
        .iter()
        .map(|moment| {
            let end_of_second = moment.time.as_second() + 1;
            let before = |step: &&Step| follows(moment, step) && step.time.as_second() < end_of_second;
            let position = steps.iter().filter(before).map(|step| step.time).max();
            let after = format!("{} s", moment.time.as_second() - first.as_second());
            let row = row(&after, ["", moment.component, &moment.what, "", ""]);
            (position.map_or(moment.time, |after| after.max(moment.time)), row)
        })
        .collect();
    // A step that a moment follows comes first: the sort keeps equal ones in order.
    let of_moments = rows.len();
    rows.extend(steps.iter().map(|step| {
        let after = (step.time.as_nanosecond() - first.as_nanosecond()).max(0) / 1_000_000;
        let took = format!("{:.1} ms", step.duration().as_secs_f64() * 1000.0);
        let error = if step.error.is_empty() { String::new() } else { format!("failed: {}", step.error) };
        let cells = [step.state.as_str(), &step.component, &step.call, &took, &error];
        (step.time, row(&format!("{}.{:03} s", after / 1000, after % 1000), cells))
    }));
    rows.rotate_left(of_moments);
    rows.sort_by_key(|(time, _)| *time);
    let heading = row("after", ["state", "component", "call", "took", ""]);
    [heading].into_iter().chain(rows.into_iter().map(|(_, row)| row)).collect()
}

/// Whether a moment must have come after a step if both happened in the same second.
fn follows(moment: &Moment, step: &Step) -> bool {
    step.error.is_empty() && moment.follows.contains(&step.call.as_str())
}

fn row(after: &str, [state, component, call, took, error]: [&str; 5]) -> String {
    format!("{after:>12}  {state:<11} {component:<24} {call:<28} {took:>10}  {error}").trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_to_be_explained_is_said_as_with_kubectl() {
        assert_eq!(parse("pvc/data").unwrap(), (Kind::Claim, "data"));
        assert_eq!(parse("pod/web").unwrap(), (Kind::Pod, "web"));
        assert!(parse("data").unwrap_err().to_string().contains("pvc/data"));
        assert_eq!(parse("volumesnapshot/x").unwrap(), (Kind::Snapshot, "x"));
        assert!(parse("deployment/x").is_err());
        assert!(parse("pv/").is_err());
    }

    fn step(component: &str, call: &str, end: &str, took_ms: u64) -> Step {
        let (component, call) = (component.to_owned(), call.to_owned());
        Step { time: end.parse().unwrap(), component, call, duration_us: took_ms * 1000, ..Step::default() }
    }

    fn moment(what: &str, component: &'static str, follows: &'static [&'static str]) -> Moment {
        Moment { time: "2026-01-01T00:00:07Z".parse().unwrap(), component, what: what.to_owned(), follows }
    }

    /// The rows without the heading, each as its time and what happened.
    fn shown(moments: &[Moment], steps: &[Step]) -> Vec<String> {
        let fields = |row: String| {
            let words: Vec<_> = row.split_whitespace().map(str::to_owned).collect();
            words.join(" ")
        };
        rows(moments, steps).into_iter().skip(1).map(fields).collect()
    }

    #[test]
    fn an_object_is_never_shown_before_the_step_that_made_it() {
        let steps = [
            step("provisioner", "CreateVolume", "2026-01-01T00:00:07.400Z", 100),
            step("pv-controller", "bind", "2026-01-01T00:00:07.450Z", 10),
            step("volume-manager", "NodePublishVolume", "2026-01-01T00:00:07.900Z", 50),
        ];
        let moments = vec![
            moment("claim created", "user", &[]),
            moment("volume object created", "provisioner", &["CreateVolume"]),
            moment("pod one accepted", "node", &["CreateVolume", "bind"]),
        ];
        assert_eq!(
            shown(&moments, &steps),
            [
                "0 s user claim created",
                "0.100 s provisioner CreateVolume 100.0 ms",
                "0 s provisioner volume object created",
                "0.150 s pv-controller bind 10.0 ms",
                "0 s node pod one accepted",
                "0.600 s volume-manager NodePublishVolume 50.0 ms",
            ]
        );
    }

    #[test]
    fn times_of_objects_are_whole_seconds_before_or_after_the_first_step() {
        let late = [step("provisioner", "CreateVolume", "2026-01-01T00:01:07.400Z", 100)];
        let claim = || vec![moment("claim created", "user", &[])];
        assert_eq!(shown(&claim(), &late)[0], "-60 s user claim created");
        assert_eq!(shown(&claim(), &[]), ["0 s user claim created"]);
    }

    #[test]
    fn a_step_that_failed_makes_no_object() {
        let failed = Step {
            error: "full".to_owned(),
            ..step("provisioner", "CreateVolume", "2026-01-01T00:00:07.400Z", 1)
        };
        let made = step("provisioner", "CreateVolume", "2026-01-01T00:00:07.500Z", 1);
        let volume = moment("volume object created", "provisioner", &["CreateVolume"]);
        let rows = shown(&[volume], &[failed, made]);
        assert!(rows[2].ends_with("volume object created"), "{rows:?}");
    }
}
