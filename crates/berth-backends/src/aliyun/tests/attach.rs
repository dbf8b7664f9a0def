//! Disks on instances, and what takes time or fails.

use super::*;

#[tokio::test]
async fn what_errors_fails_at_once_and_what_takes_time_is_waited_for() {
    let bench = Bench::new().await;
    bench.cloud.lock().looks = 3;
    let volume = bench.create("disk-1", GIB).await.unwrap();
    let told = bench.attach(&volume, "i-1").await.unwrap();
    assert_eq!(bench.attach(&volume, "i-1").await.unwrap(), told);
    let error = bench.attach(&volume, "i-2").await.unwrap_err();
    assert!(matches!(&error, Error::Precondition(said) if said.contains("\"i-1\"")), "{error}");
    bench.detach(&volume, "i-2").await.unwrap();
    assert_eq!(bench.account.get(&bench.ctx, &volume.id).await.unwrap().unwrap().attachments.len(), 1);
    let error = bench.account.delete(&bench.ctx, &volume.id).await.unwrap_err();
    assert!(matches!(error, Error::Precondition(_)), "{error}");
    bench.fault("DetachDisk", Fault::Errored);
    let start = std::time::Instant::now();
    let error = bench.detach(&volume, "i-1").await.unwrap_err();
    assert!(matches!(&error, Error::State(said) if said.contains("In_use")), "{error}");
    bench.detach(&volume, "i-1").await.unwrap();
    bench.detach(&volume, "i-1").await.unwrap();
    bench.fault("AttachDisk", Fault::Errored);
    let error = bench.attach(&volume, "i-1").await.unwrap_err();
    assert!(matches!(&error, Error::State(said) if said.contains("attach")), "{error}");
    assert!(start.elapsed() < Duration::from_secs(60));
    // An attachment that is under way is detached all the same.
    bench
        .account
        .api
        .attach_disk(volume.id.as_str(), "i-1", Deadline::after(Duration::from_secs(5)))
        .await
        .unwrap();
    bench.detach(&volume, "i-1").await.unwrap();
    assert!(bench.account.get(&bench.ctx, &volume.id).await.unwrap().unwrap().attachments.is_empty());
}

#[tokio::test]
async fn an_instance_that_is_full_unknown_or_busy_is_told_apart() {
    let bench = Bench::new().await;
    let mut volumes = Vec::new();
    for name in ["a1", "b1", "c1", "d1"] {
        volumes.push(bench.create(name, GIB).await.unwrap());
    }
    // Something else is done to the instance: it is asked again.
    bench.fault("AttachDisk", Fault::Before(403, "IncorrectInstanceStatus"));
    bench.fault("AttachDisk", Fault::Before(429, "Throttling.User"));
    for volume in &volumes[..3] {
        bench.attach(volume, "i-1").await.unwrap();
    }
    let error = bench.attach(&volumes[3], "i-1").await.unwrap_err();
    assert!(matches!(&error, Error::Exhausted(said) if said.contains("instance type")), "{error}");
    let error = bench.attach(&volumes[3], "fake-node").await.unwrap_err();
    assert!(matches!(&error, Error::NotFound { what: "node", .. }), "{error}");
    bench.fault("AttachDisk", Fault::Before(403, "Forbidden.RAM"));
    assert!(matches!(bench.attach(&volumes[3], "i-2").await, Err(Error::Denied(_))));
    let listed = bench.account.list(&bench.ctx, &PageRequest { after: None, limit: 3 }).await.unwrap();
    let nodes: Vec<_> = listed.entries.iter().map(|volume| volume.attachments[0].node.to_string()).collect();
    assert_eq!((nodes, listed.next.is_some()), (vec!["i-1".to_owned(); 3], true));
    let rest = bench.account.list(&bench.ctx, &PageRequest { after: listed.next, limit: 3 }).await.unwrap();
    assert_eq!((rest.entries.len(), rest.next), (1, None));
    let limit = limit_of(Some(&bench.account.api), &"i-1".parse().unwrap(), "ecs.g7.large").await;
    assert_eq!(limit, Some(16), "one is the system disk, and the volumes there do not count");
    assert_eq!(limit_of(None, &"i-1".parse().unwrap(), "ecs.g7.large").await, None);
}
