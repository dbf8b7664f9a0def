//! `berth explain pvc/NAME`: a volume's timeline, and for one that is stuck, why and what to do.

mod diagnose;
mod observe;

use std::process::ExitCode;

use anyhow::bail;
use clap::Args as ClapArgs;
use jiff::Timestamp;

use self::observe::{Moment, Observed};
use crate::machine::ClusterArgs;
use crate::timeline::{self, Step};

pub(crate) use self::diagnose::{Diagnosis, diagnose};

/// Show what happened to a volume, and what it waits for.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Exit status: 0 no problems, 1 error, 2 wrong command line, 3 stuck")]
pub(crate) struct Args {
    /// What to explain: pvc/NAME, pv/NAME or pod/NAME
    #[arg(value_name = "KIND/NAME")]
    what: String,

    /// The namespace of a claim or pod
    #[arg(long, short = 'n', default_value = "default")]
    namespace: String,

    #[command(flatten)]
    cluster: ClusterArgs,
}

/// The objects that can be explained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Claim,
    Volume,
    Pod,
}

/// The exit status for an object that is stuck: a script can distinguish it from an error (1) and a wrong command line (2).
const STUCK: u8 = 3;

/// Prints the explanation; the exit status says whether the object is stuck.
pub(crate) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let (kind, name) = parse(&args.what)?;
    let (cluster, data_dir) = args.cluster.connect().await?;
    let observed = observe::observe(&cluster, kind, &args.namespace, name).await?;
    let steps = data_dir.map_or_else(Vec::new, |dir| timeline::read(&dir, |step| observed.concerns(step)));
    let diagnosis = diagnose(&observed);
    print!("{}", text(&observed, &steps, &diagnosis));
    Ok(if diagnosis.stuck { ExitCode::from(STUCK) } else { ExitCode::SUCCESS })
}

fn parse(what: &str) -> anyhow::Result<(Kind, &str)> {
    let Some((kind, name)) = what.split_once('/') else {
        bail!("{what:?} names no kind: write pvc/{what}, pv/{what} or pod/{what}");
    };
    let kind = match kind {
        "pvc" | "persistentvolumeclaim" | "persistentvolumeclaims" => Kind::Claim,
        "pv" | "persistentvolume" | "persistentvolumes" => Kind::Volume,
        "pod" | "po" | "pods" => Kind::Pod,
        other => bail!("there is nothing to explain about a {other}; pvc, pv and pod can be explained"),
    };
    if name.is_empty() {
        bail!("the name is missing after {what}");
    }
    Ok((kind, name))
}

fn text(observed: &Observed, steps: &[Step], diagnosis: &Diagnosis) -> String {
    let mut lines = vec![observed.headline(), String::new()];
    let rows = rows(observed.moments(), steps);
    if !rows.is_empty() {
        lines.extend(rows);
        lines.push(String::new());
    }
    let Diagnosis { stuck, why, what_to_do } = diagnosis;
    lines.push(if *stuck { format!("Stuck: {why}") } else { why.clone() });
    lines.extend(what_to_do.iter().map(|advice| format!("What to do: {advice}")));
    lines.push(String::new());
    lines.join("\n")
}

/// One line per step of the timeline and per time that an object records, in the order in which they happened.
///
/// A step's time is exact, and counts from the beginning of the first step. An object's time is known to the second, so it
/// is shown in whole seconds, and within its second it comes after the steps that it must have followed.
fn rows(moments: Vec<Moment>, steps: &[Step]) -> Vec<String> {
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
        .into_iter()
        .map(|moment| {
            let end_of_second = moment.time.as_second() + 1;
            let before = |step: &&Step| moment.follows(step) && step.time.as_second() < end_of_second;
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
        assert!(parse("sc/x").is_err());
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
    fn shown(moments: Vec<Moment>, steps: &[Step]) -> Vec<String> {
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
            shown(moments, &steps),
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
        assert_eq!(shown(claim(), &late)[0], "-60 s user claim created");
        assert_eq!(shown(claim(), &[]), ["0 s user claim created"]);
    }

    #[test]
    fn a_step_that_failed_makes_no_object() {
        let failed = Step {
            error: "full".to_owned(),
            ..step("provisioner", "CreateVolume", "2026-01-01T00:00:07.400Z", 1)
        };
        let made = step("provisioner", "CreateVolume", "2026-01-01T00:00:07.500Z", 1);
        let volume = moment("volume object created", "provisioner", &["CreateVolume"]);
        let rows = shown(vec![volume], &[failed, made]);
        assert!(rows[2].ends_with("volume object created"), "{rows:?}");
    }
}
