//! Counts the calls that many cloud disks cost: created, attached to simulated servers, detached and deleted, all at once, on a twin
//! that limits requests as the provider does, beside the calls that csi-digitalocean's pattern would make for the same work.
//!
//! Upstream's calls are counted from what its driver does for each CSI call ([`upstream`]), not measured. An operation that fails
//! ends the bench; a number that is too large does not: it is for reading. `VOLUMES` (500), `SERVERS` (100) and `ACTION` (seconds that an
//! attachment takes, 5) choose how much is done. With 500 volumes it takes about ten minutes, because of the limit.

mod upstream;

use std::env;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use berth_csi::v1;
use berth_e2e::Csi;
use berth_e2e::cloud::{CloudBench, GIB, PROVIDERS, capability};
use berth_e2e::table::{Table, count};
use futures_util::future::try_join_all;
use tonic::Status;

use self::upstream::Pattern;

/// How long a call may take: it waits for its turn among all others.
const CALL: Duration = Duration::from_secs(600);
/// The provider's limits, as the twin has them by default.
const LIMIT: &str = "250/m,5000/h";
const LIMIT_A_MINUTE: u64 = 250;
/// The id of the first simulated server.
const FIRST_SERVER: usize = 1000;

#[tokio::main]
async fn main() -> ExitCode {
    match measure().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench-cloud: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn number(name: &str, default: usize) -> usize {
    env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// A request with the bench's deadline.
fn patient<T>(message: T) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    request.set_timeout(CALL);
    request
}

/// What one kind of operation took and cost.
struct Phase {
    name: &'static str,
    time: Duration,
    calls: u64,
    throttled: u64,
    upstream: u64,
}

/// Does some work, and counts the calls of the API meanwhile.
async fn phase<T>(
    bench: &CloudBench,
    phases: &mut Vec<Phase>,
    name: &'static str,
    upstream: u64,
    work: impl Future<Output = Result<T, Status>>,
) -> Result<T> {
    bench.account.steer("DELETE", "calls", "")?;
    let begun = Instant::now();
    let done = work.await.with_context(|| format!("{name}\n{}", bench.log()))?;
    let (time, counted) = (begun.elapsed(), bench.account.calls()?);
    let of = |what: &str| counted[what].as_u64().unwrap_or_default();
    eprintln!("{name}: {:.0} s, {}", time.as_secs_f64(), counted["calls"]);
    phases.push(Phase { name, time, calls: of("total"), throttled: of("throttled"), upstream });
    Ok(done)
}

async fn measure() -> Result<()> {
    let (volumes, servers, action) = (number("VOLUMES", 500), number("SERVERS", 100), number("ACTION", 5));
    let (limit, attaching, detaching) =
        ((volumes + 1).to_string(), format!("attach={action}s"), format!("detach={action}s"));
    let flags =
        ["--rate-limit", LIMIT, "--volume-limit", &limit, "--delay", &attaching, "--delay", &detaching];
    let bench = CloudBench::start(&PROVIDERS[0], &flags, &[]).await?;
    for server in 0..servers {
        let new = format!(r#"{{"id":"{}","devices":false}}"#, FIRST_SERVER + server);
        bench.account.steer("POST", "instances", &new)?;
    }
    let (csi, mut phases) = (bench.csi()?, Vec::new());
    let server = |number: usize| (FIRST_SERVER + number % servers).to_string();
    let upstream =
        |calls, action, workers| Pattern { calls, action, workers }.count(volumes, servers, LIMIT_A_MINUTE);
    // GET volume, GET droplet and POST action, by csi-attacher.
    let actions = upstream(3, Some(action as u64), 10);

    let all = try_join_all((0..volumes).map(|number| create(&csi, number)));
    let ids = phase(&bench, &mut phases, "create", upstream(2, None, 100), all).await?;
    let all = try_join_all(ids.iter().enumerate().map(|(number, id)| attach(&csi, id, server(number))));
    phase(&bench, &mut phases, "attach", actions, all).await?;
    let all = try_join_all(ids.iter().enumerate().map(|(number, id)| detach(&csi, id, server(number))));
    phase(&bench, &mut phases, "detach", actions, all).await?;
    let all = try_join_all(ids.iter().map(|id| delete(&csi, id)));
    phase(&bench, &mut phases, "delete", upstream(1, None, 100), all).await?;
    show(&phases, volumes, servers, action);
    bench.finish().await
}

fn show(phases: &[Phase], volumes: usize, servers: usize, action: usize) {
    let title = format!(
        "{volumes} volumes, {servers} servers, {action} s for an attachment, {LIMIT} calls; no operation failed"
    );
    let header = ["", "time", "calls", "of them needed", "refused", "upstream's pattern", "of upstream's"];
    let mut table = Table::new(title, &header);
    let whole = |number: u64| count(usize::try_from(number).unwrap_or(usize::MAX));
    let mut row = |name: &str, time: Duration, calls: u64, needed: u64, refused: u64, upstream: u64| {
        let thousandths = calls * 1000 / upstream.max(1);
        let share = format!("{}.{} %", thousandths / 10, thousandths % 10);
        let time = format!("{:.0} s", time.as_secs_f64());
        table.add(vec![
            name.into(),
            time,
            whole(calls),
            whole(needed),
            whole(refused),
            whole(upstream),
            share,
        ]);
    };
    let needed = volumes as u64;
    for phase in phases {
        row(phase.name, phase.time, phase.calls, needed, phase.throttled, phase.upstream);
    }
    let sum = |of: fn(&Phase) -> u64| phases.iter().map(of).sum::<u64>();
    let time = phases.iter().map(|phase| phase.time).sum();
    row("all", time, sum(|one| one.calls), 4 * needed, sum(|one| one.throttled), sum(|one| one.upstream));
    println!("{table}");
}

async fn create(csi: &Csi, number: usize) -> Result<String, Status> {
    let request = v1::CreateVolumeRequest {
        name: format!("pvc-{number:04}"),
        capacity_range: Some(v1::CapacityRange { required_bytes: GIB, limit_bytes: 0 }),
        volume_capabilities: vec![capability()],
        ..Default::default()
    };
    let made = csi.controller.clone().create_volume(patient(request)).await?.into_inner().volume;
    Ok(made.ok_or_else(|| Status::internal("the answer has no volume"))?.volume_id)
}

async fn attach(csi: &Csi, id: &str, server: String) -> Result<(), Status> {
    let request = v1::ControllerPublishVolumeRequest {
        volume_id: id.to_owned(),
        node_id: server,
        volume_capability: Some(capability()),
        ..Default::default()
    };
    csi.controller.clone().controller_publish_volume(patient(request)).await.map(drop)
}

async fn detach(csi: &Csi, id: &str, server: String) -> Result<(), Status> {
    let request = v1::ControllerUnpublishVolumeRequest {
        volume_id: id.to_owned(),
        node_id: server,
        ..Default::default()
    };
    csi.controller.clone().controller_unpublish_volume(patient(request)).await.map(drop)
}

async fn delete(csi: &Csi, id: &str) -> Result<(), Status> {
    let request = v1::DeleteVolumeRequest { volume_id: id.to_owned(), ..Default::default() };
    csi.controller.clone().delete_volume(patient(request)).await.map(drop)
}
