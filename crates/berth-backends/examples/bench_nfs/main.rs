//! Measures volumes on the kernel's NFS server, made, deleted and published by csi-driver-nfs's pattern (mount, work,
//! unmount, by programs) and by Berth, in one run, with as many callers; prints which targets hold.
//!
//! `make bench-nfs` runs it in the virtual machine. Times there compare only with times of the same run, so the targets
//! are ratios. `DIRECTORIES` for another number of volumes on one share than 10,000; `VERSION` for 4.0 or 4.2.

#![expect(clippy::unwrap_used, reason = "a measurement says by a panic what went wrong")]

#[path = "../../tests/nfs_kernel/caller.rs"]
#[expect(dead_code, reason = "a measurement needs less than the tests")]
mod caller;
#[path = "../../tests/nfs/calls.rs"]
#[allow(dead_code, reason = "each suite uses a part of it")]
mod calls;
#[path = "../../tests/nfs_kernel/kernel.rs"]
#[expect(dead_code, reason = "a measurement needs less than the tests")]
mod kernel;
mod programs;
#[path = "../../tests/nfs/served.rs"]
mod served;

use std::{
    env, fs,
    ops::Range,
    path::Path,
    time::{Duration, Instant},
};

use futures_util::{StreamExt as _, stream};

use self::{caller::Caller, kernel::EXPORT, served::Served};

/// Calls under way at the same time.
const CALLERS: usize = 8;
/// How many volumes are handled by programs; each takes about as long as a hundred of Berth's.
const FEW: usize = 48;
/// How many volumes Berth creates and deletes.
const MANY: usize = 1600;
/// Volumes that are published.
const PUBLISHED: usize = 160;
/// No call takes longer.
const PATIENCE: Duration = Duration::from_secs(120);
/// A step of the long run.
const THOUSAND: usize = 1000;

/// One kind of work, both ways.
struct Row {
    what: &'static str,
    programs: f64,
    berth: f64,
    target: Option<f64>,
}

/// What a volume of the measurement is called.
fn name(number: usize) -> String {
    format!("pvc-{number:08}")
}

/// Waits until what was deleted is no longer on the server's disk.
async fn until_removed() {
    let trash = Path::new(EXPORT).join(".berth/trash");
    while fs::read_dir(&trash).unwrap().next().is_some() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// How many per second, with as many callers as there are.
async fn rate(numbers: Range<usize>, work: impl AsyncFn(usize)) -> f64 {
    let (count, begun) = (numbers.len(), Instant::now());
    stream::iter(numbers).map(|number| work(number)).buffer_unordered(CALLERS).for_each(async |()| ()).await;
    per_second(count, begun.elapsed())
}

fn per_second(count: usize, took: Duration) -> f64 {
    f64::from(u32::try_from(count).unwrap()) / took.as_secs_f64()
}

/// A volume that has a little in it, put there on the server's disk.
fn fill(name: &str) {
    let dir = Path::new(EXPORT).join(name);
    fs::create_dir(dir.join("dir")).unwrap();
    for file in ["one", "dir/two", "dir/three"] {
        fs::write(dir.join(file), "a little").unwrap();
    }
}

fn by_programs(number: usize) -> String {
    format!("program-{number}")
}

async fn create_and_delete(berth: &Caller, version: &str) -> [Row; 2] {
    let work = tempfile::tempdir().unwrap();
    let (mounts, version) = (work.path().to_owned(), version.to_owned());
    let mounted = |number: usize, work: fn(&Path)| {
        let (at, version) = (mounts.join(by_programs(number)), version.clone());
        let inside = at.join(by_programs(number));
        programs::blocking(move || programs::on_a_mount(&at, &version, || work(&inside)))
    };
    eprintln!("create: {FEW} by programs");
    let created = rate(0..FEW, |number| mounted(number, |dir| fs::create_dir(dir).unwrap())).await;
    (0..FEW).for_each(|number| fill(&by_programs(number)));
    eprintln!("delete: {FEW} by programs");
    let deleted = rate(0..FEW, |number| mounted(number, |dir| fs::remove_dir_all(dir).unwrap())).await;

    // The first call makes the connection and the driver's directories.
    berth.create("first").await.unwrap();
    eprintln!("create: {MANY} by Berth");
    let berth_created = rate(0..MANY, async |number| berth.create(&name(number)).await.unwrap()).await;
    (0..MANY).for_each(|number| fill(&name(number)));
    eprintln!("delete: {MANY} by Berth");
    let begun = Instant::now();
    rate(0..MANY, async |number| berth.delete(&name(number)).await.unwrap()).await;
    until_removed().await;
    let berth_deleted = per_second(MANY, begun.elapsed());
    [
        Row { what: "CreateVolume", programs: created, berth: berth_created, target: Some(20.0) },
        Row {
            what: "DeleteVolume, to the last byte",
            programs: deleted,
            berth: berth_deleted,
            target: Some(10.0),
        },
    ]
}

async fn publish(berth: &Caller, version: &str) -> [Row; 2] {
    let work = tempfile::tempdir().unwrap();
    for number in 0..PUBLISHED {
        berth.create(&name(number)).await.unwrap();
    }
    let (targets, version) = (work.path().to_owned(), version.to_owned());
    let target = |number: usize| targets.join(by_programs(number));
    eprintln!("publish: {FEW} by programs");
    let mounted = rate(0..FEW, |number| {
        let (target, version) = (target(number), version.clone());
        programs::blocking(move || programs::mount(&name(number), &version, &target))
    });
    let mounted = mounted.await;
    eprintln!("unpublish: {FEW} by programs");
    let unmounted = rate(0..FEW, |number| {
        let target = target(number);
        programs::blocking(move || programs::unmount(&target))
    });
    let unmounted = unmounted.await;
    // The first volume of a share mounts it; these are the second and later ones.
    berth.publish(&name(0), &targets.join("0")).await.unwrap();
    eprintln!("publish: {} by Berth", PUBLISHED - 1);
    let at = |number: usize| targets.join(number.to_string());
    let published =
        rate(1..PUBLISHED, async |number| berth.publish(&name(number), &at(number)).await.unwrap()).await;
    eprintln!("unpublish: {} by Berth", PUBLISHED - 1);
    let unpublished =
        rate(1..PUBLISHED, async |number| berth.unpublish(&name(number), &at(number)).await.unwrap()).await;
    berth.unpublish(&name(0), &at(0)).await.unwrap();
    for number in 0..PUBLISHED {
        berth.delete(&name(number)).await.unwrap();
    }
    [
        Row { what: "NodePublishVolume", programs: mounted, berth: published, target: Some(5.0) },
        Row { what: "NodeUnpublishVolume", programs: unmounted, berth: unpublished, target: None },
    ]
}

fn print(rows: &[Row]) {
    println!("{:32} {:>12} {:>10} {:>8} {:>8}", "calls per second", "programs", "Berth", "ratio", "target");
    for row in rows {
        let ratio = row.berth / row.programs;
        let (target, holds) = match row.target {
            None => (String::new(), ""),
            Some(target) if ratio >= target => (format!("≥ {target}x"), "ok"),
            Some(target) => (format!("≥ {target}x"), "MISSED"),
        };
        println!(
            "{:32} {:>12.1} {:>10.1} {:>7.1}x {target:>8} {holds}",
            row.what, row.programs, row.berth, ratio
        );
    }
}

fn middle(rates: &[f64]) -> f64 {
    let mut sorted = rates.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// Makes volume after volume on one share.
async fn many(berth: &Caller, directories: usize) {
    println!("\n{:32} {:>12}", "CreateVolume with so many there", "per second");
    let mut rates = Vec::new();
    for thousand in 0..directories / THOUSAND {
        let numbers = thousand * THOUSAND..(thousand + 1) * THOUSAND;
        rates.push(rate(numbers, async |number| berth.create(&name(number)).await.unwrap()).await);
        eprintln!("{} volumes", (thousand + 1) * THOUSAND);
        println!("{:>32} {:>12.1}", thousand * THOUSAND, rates[thousand]);
    }
    if rates.len() > 1 {
        // Of each half the middle one: whatever else the machine does shows in single steps.
        let (first, last) = rates.split_at(rates.len() / 2);
        let ratio = middle(last) / middle(first);
        let holds = if ratio >= 0.75 { "ok" } else { "MISSED" };
        println!("{:32} {ratio:>11.2}x {:>19} {holds}", "the later half to the earlier", "≥ 0.75x");
    }
}

fn main() {
    berth_host::helper::intercept(&[berth_host::remote::MOUNT_WORKER]);
    tokio::runtime::Runtime::new().unwrap().block_on(measure());
}

async fn measure() {
    kernel::serve();
    let version = env::var("VERSION").unwrap_or_else(|_| "4.1".to_owned());
    let directories = env::var("DIRECTORIES").map_or(10 * THOUSAND, |count| count.parse().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let served = Served::start(dir.path(), kernel::backend(dir.path()).await).await;
    let berth = Caller::new(&served.socket, &version, PATIENCE);
    println!("NFS {version}, kernel's server and client on loopback, {CALLERS} callers");
    let mut rows = create_and_delete(&berth, &version).await.into_iter().collect::<Vec<_>>();
    rows.extend(publish(&berth, &version).await);
    print(&rows);
    many(&berth, directories).await;
    served.end().await;
}
