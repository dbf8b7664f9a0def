//! Measures the client on Ganesha: how many directories per second it makes, changes and removes, by version.
//!
//! `cargo run --release -p berth-nfs --example nfs_bench`, as root; `ROUNDS` for more than 500 of each.

#![expect(clippy::unwrap_used, reason = "a measurement says by a panic what went wrong")]

use std::{env, time::Instant};

use berth_nfs::{Change, Create, Share, Version};
use bytes::Bytes;
use futures_util::{StreamExt, stream};

#[path = "../../../testbed/nfs/ganesha.rs"]
#[allow(dead_code, reason = "each suite uses a part of it")]
mod ganesha;
#[path = "../tests/ganesha/server.rs"]
#[expect(dead_code, reason = "a measurement needs less than the tests")]
mod server;

const CALLERS: usize = 8;
const MEBIBYTES: u64 = 64;

async fn cycle(share: &Share, name: String) {
    let root = share.root();
    let made = share.make_dir(&root, &name, &Change::default()).await.unwrap();
    let change = Change { mode: Some(0o770), uid: Some(1000), gid: Some(1000), ..Change::default() };
    share.set_attributes(&made.handle, &change).await.unwrap();
    share.remove_dir(&root, &name).await.unwrap();
}

/// Cycles of making, changing and removing a directory per second.
async fn cycles(share: &Share, rounds: u32, callers: usize) -> f64 {
    let begun = Instant::now();
    stream::iter(0..rounds)
        .map(|n| cycle(share, format!("dir {n}")))
        .buffer_unordered(callers)
        .for_each(async |()| ())
        .await;
    f64::from(rounds) / begun.elapsed().as_secs_f64()
}

/// Mebibytes per second, written and read.
async fn transfer(share: &Share) -> (f64, f64) {
    let file =
        share.create(&share.root(), "data", Create::Truncate, &Change::default()).await.unwrap().handle;
    let data = Bytes::from(vec![7; 1 << 20]);
    let offsets = || stream::iter((0..MEBIBYTES).map(|n| n << 20));
    let rate = |begun: Instant| f64::from(u32::try_from(MEBIBYTES).unwrap()) / begun.elapsed().as_secs_f64();
    let begun = Instant::now();
    offsets()
        .for_each_concurrent(4, async |offset| {
            let mut done = 0;
            while done < data.len() {
                let rest = data.slice(done..);
                done += share.write(&file, offset + done as u64, rest, false).await.unwrap() as usize;
            }
        })
        .await;
    share.commit(&file).await.unwrap();
    let written = rate(begun);
    let begun = Instant::now();
    offsets()
        .for_each_concurrent(4, async |offset| {
            let mut done = 0;
            while done < 1 << 20 {
                let rest = u32::try_from((1 << 20) - done).unwrap();
                done += share.read(&file, offset + done, rest).await.unwrap().0.len() as u64;
            }
        })
        .await;
    share.remove(&share.root(), "data").await.unwrap();
    (written, rate(begun))
}

#[tokio::main]
async fn main() {
    let rounds = env::var("ROUNDS").map_or(500, |rounds| rounds.parse().unwrap());
    let server = server::Server::with(&["cache=60"]);
    println!("version  mkdir+setattr+rmdir/s  with {CALLERS} callers  write MiB/s  read MiB/s");
    for version in Version::ALL {
        let share = server.share(version).await;
        cycles(&share, rounds / 10, CALLERS).await;
        let (one, many) = (cycles(&share, rounds, 1).await, cycles(&share, rounds, CALLERS).await);
        let (written, read) = transfer(&share).await;
        println!("{:<7}  {one:>21.0}  {many:>14.0}  {written:>11.0}  {read:>10.0}", version.to_string());
    }
}
