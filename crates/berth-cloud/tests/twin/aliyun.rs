//! Alibaba Cloud's ECS API: signed requests, disks, client tokens, snapshots and metadata.

use std::fs;
use std::io::{Seek as _, SeekFrom};

use base64::Engine as _;
use berth_cloud::Provider;
use serde_json::{Value, json};

use crate::client::{Answer, Directory, Running, eventually, options};

const SECRET: &str = "shared";

fn start(directory: &Directory) -> Running {
    let provider = Provider::Aliyun {
        access_key_id: "key".to_owned(),
        access_key_secret: SECRET.to_owned(),
        nvme: false,
    };
    Running::start(options(provider, "cn-hangzhou", &["i-a", "i-b"], &directory.path()))
}

fn encode(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
    let escape = |byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    text.bytes().map(escape).collect()
}

/// The query of a request that is signed as the older SDK does it.
fn signed(action: &str, parameters: &[(&str, &str)], secret: &str, nonce: &str) -> String {
    let now = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let common = [
        ("Action", action),
        ("Version", "2014-05-26"),
        ("Format", "JSON"),
        ("RegionId", "cn-hangzhou"),
        ("Timestamp", &now),
        ("SignatureMethod", "HMAC-SHA1"),
        ("SignatureVersion", "1.0"),
        ("SignatureNonce", nonce),
        ("AccessKeyId", "key"),
    ];
    let mut pairs: Vec<_> = common.iter().chain(parameters).collect();
    pairs.sort();
    let query: Vec<_> =
        pairs.iter().map(|(name, value)| format!("{}={}", encode(name), encode(value))).collect();
    let query = query.join("&");
    let key =
        ring::hmac::Key::new(ring::hmac::HMAC_SHA1_FOR_LEGACY_USE_ONLY, format!("{secret}&").as_bytes());
    let signature = ring::hmac::sign(&key, format!("POST&%2F&{}", encode(&query)).as_bytes());
    let signature = base64::engine::general_purpose::STANDARD.encode(signature.as_ref());
    format!("{query}&Signature={}", encode(&signature))
}

fn call(twin: &Running, action: &str, parameters: &[(&str, &str)]) -> Answer {
    static NONCE: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let nonce = format!("nonce-{}", NONCE.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
    let query = signed(action, parameters, SECRET, &nonce);
    twin.send("POST", &format!("/?{query}"), "", "").expect("there is an answer")
}

fn ok(twin: &Running, action: &str, parameters: &[(&str, &str)]) -> Value {
    let answer = call(twin, action, parameters);
    assert_eq!(answer.status, 200, "{action}: {}", answer.text);
    answer.json()
}

fn code(twin: &Running, action: &str, parameters: &[(&str, &str)]) -> String {
    let answer = call(twin, action, parameters);
    assert_ne!(answer.status, 200, "{action}: {}", answer.text);
    answer.json()["Code"].as_str().unwrap().to_owned()
}

fn create(twin: &Running, more: &[(&str, &str)]) -> String {
    let usual = [("ZoneId", "cn-hangzhou-h"), ("DiskCategory", "cloud_auto"), ("Size", "1")];
    let asked: Vec<_> = usual.iter().chain(more).copied().collect();
    ok(twin, "CreateDisk", &asked)["DiskId"].as_str().unwrap().to_owned()
}

fn disk(twin: &Running, id: &str) -> Value {
    ok(twin, "DescribeDisks", &[("DiskIds", &json!([id]).to_string())])["Disks"]["Disk"][0].clone()
}

fn until(twin: &Running, id: &str, status: &str) -> Value {
    eventually(status, || Some(disk(twin, id)).filter(|disk| disk["Status"] == json!(status)))
}

#[test]
fn a_disk_is_attached_resized_snapshotted_and_deleted() {
    let directory = Directory::new();
    let twin = start(&directory);
    let id = create(&twin, &[("Tag.1.Key", "k"), ("Tag.1.Value", "v"), ("DiskName", "d")]);
    let seen = until(&twin, &id, "Available");
    assert_eq!(seen["Tags"]["Tag"], json!([{"TagKey": "k", "TagValue": "v"}]));
    assert_eq!((&seen["MultiAttach"], &seen["SerialNumber"]), (&json!("Disabled"), &json!(id[2..])));
    let by_tag =
        ok(&twin, "DescribeDisks", &[("Tag.1.Key", "k"), ("Tag.1.Value", "v"), ("MaxResults", "10")]);
    assert_eq!(by_tag["TotalCount"], json!(1));

    ok(&twin, "AttachDisk", &[("DiskId", &id), ("InstanceId", "i-a")]);
    let seen = until(&twin, &id, "In_use");
    assert_eq!(seen["Attachments"]["Attachment"][0]["InstanceId"], json!("i-a"));
    let link = twin.twin.devices_of("i-a").join(format!("virtio-{}", &id[2..]));
    let size = || fs::File::open(&link).unwrap().seek(SeekFrom::End(0)).unwrap();
    assert_eq!(size(), 1 << 30);
    let refused = [("AttachDisk", "i-b"), ("DetachDisk", "i-b")];
    for (action, instance) in refused {
        assert_eq!(code(&twin, action, &[("DiskId", &id), ("InstanceId", instance)]), "IncorrectDiskStatus");
    }
    assert_eq!(code(&twin, "ResizeDisk", &[("DiskId", &id), ("NewSize", "2")]), "IncorrectDiskStatus");
    ok(&twin, "ResizeDisk", &[("DiskId", &id), ("NewSize", "2"), ("Type", "online")]);
    assert_eq!((disk(&twin, &id)["Size"].as_u64(), size()), (Some(2), 2 << 30));

    let taken = ok(&twin, "CreateSnapshot", &[("DiskId", &id), ("SnapshotName", "s"), ("ClientToken", "t")]);
    let snapshot = taken["SnapshotId"].as_str().unwrap();
    let list = || ok(&twin, "DescribeSnapshots", &[("SnapshotIds", &json!([snapshot]).to_string())]);
    let seen = eventually("the snapshot is ready", || {
        Some(list()["Snapshots"]["Snapshot"][0].clone()).filter(|seen| seen["Available"] == json!(true))
    });
    assert_eq!((&seen["SourceDiskSize"], &seen["Status"]), (&json!("2"), &json!("accomplished")));
    assert_eq!(
        code(
            &twin,
            "CreateDisk",
            &[
                ("ZoneId", "cn-hangzhou-h"),
                ("DiskCategory", "cloud_auto"),
                ("Size", "1"),
                ("SnapshotId", snapshot),
            ]
        ),
        "InvalidDiskSize.TooSmall"
    );

    assert_eq!(code(&twin, "DeleteDisk", &[("DiskId", &id)]), "IncorrectDiskStatus");
    ok(&twin, "DetachDisk", &[("DiskId", &id), ("InstanceId", "i-a")]);
    until(&twin, &id, "Available");
    assert!(fs::symlink_metadata(&link).is_err());
    ok(&twin, "DeleteDisk", &[("DiskId", &id)]);
    assert_eq!(
        ok(&twin, "DescribeDisks", &[("DiskIds", &json!([id]).to_string())])["Disks"]["Disk"],
        json!([])
    );
    assert_eq!(code(&twin, "DeleteDisk", &[("DiskId", &id)]), "InvalidDiskId.NotFound");
    ok(&twin, "DeleteSnapshot", &[("SnapshotId", snapshot), ("Force", "true")]);
}

#[test]
fn a_client_token_gives_the_same_disk_also_after_a_restart() {
    let directory = Directory::new();
    let twin = start(&directory);
    let first = create(&twin, &[("ClientToken", "n:one")]);
    assert_eq!(create(&twin, &[("ClientToken", "n:one")]), first);
    twin.kill();
    let twin = start(&directory);
    assert_eq!(create(&twin, &[("ClientToken", "n:one")]), first);
    let other = [
        ("ZoneId", "cn-hangzhou-h"),
        ("DiskCategory", "cloud_auto"),
        ("Size", "2"),
        ("ClientToken", "n:one"),
    ];
    assert_eq!(code(&twin, "CreateDisk", &other), "IdempotentParameterMismatch");
    twin.admin("POST", "faults", "CreateDisk=drop-after");
    let query = signed(
        "CreateDisk",
        &[
            ("ZoneId", "cn-hangzhou-h"),
            ("DiskCategory", "cloud_auto"),
            ("Size", "1"),
            ("ClientToken", "n:two"),
        ],
        SECRET,
        "dropped",
    );
    assert!(twin.send("POST", &format!("/?{query}"), "", "").is_none());
    create(&twin, &[("ClientToken", "n:two")]);
    assert_eq!(ok(&twin, "DescribeDisks", &[])["TotalCount"], json!(2), "no third disk");
}

#[test]
fn requests_with_wrong_signatures_or_parameters_are_refused() {
    let directory = Directory::new();
    let twin = start(&directory);
    let send = |query: &str| {
        let answer = twin.send("POST", &format!("/?{query}"), "", "").unwrap();
        answer.json()["Code"].as_str().unwrap_or("none").to_owned()
    };
    assert_eq!(send(&signed("DescribeDisks", &[], "wrong", "a")), "SignatureDoesNotMatch");
    let right = signed("DescribeDisks", &[], SECRET, "b");
    assert_eq!(send(&right), "none");
    assert_eq!(send(&right), "SignatureNonceUsed");
    assert_eq!(send("Action=DescribeDisks&Version=2014-05-26"), "MissingSignatureMethod");
    let create = |more: &[(&'static str, &'static str)]| {
        let usual = [("ZoneId", "cn-hangzhou-h"), ("DiskCategory", "cloud_essd"), ("Size", "20")];
        let usual = usual.into_iter().filter(|(name, _)| !more.iter().any(|(other, _)| other == name));
        code(&twin, "CreateDisk", &usual.chain(more.iter().copied()).collect::<Vec<_>>())
    };
    assert_eq!(create(&[("Size", "10")]), "InvalidDiskSize.NotSupported");
    assert_eq!(create(&[("PerformanceLevel", "PL3")]), "InvalidDiskSize.NotSupported");
    assert_eq!(create(&[("PerformanceLevel", "PL9")]), "InvalidPerformanceLevel.Malformed");
    assert_eq!(create(&[("DiskCategory", "cloud")]), "InvalidDataDiskCategory.NotSupported");
    assert_eq!(create(&[("ZoneId", "cn-beijing-a")]), "InvalidZoneId.NotFound");
    assert_eq!(create(&[("SnapshotId", "s-none")]), "InvalidSnapshotId.NotFound");
    assert_eq!(code(&twin, "MakeCoffee", &[]), "InvalidAction.NotFound");
    assert_eq!(
        code(&twin, "AttachDisk", &[("DiskId", "d-none"), ("InstanceId", "i-a")]),
        "InvalidDiskId.NotFound"
    );
    let far = self::create(&twin, &[]);
    until(&twin, &far, "Available");
    assert_eq!(
        code(&twin, "AttachDisk", &[("DiskId", &far), ("InstanceId", "i-x")]),
        "InvalidInstanceId.NotFound"
    );
    twin.admin("POST", "instances", r#"{"id":"i-far","zone":"cn-hangzhou-j","devices":false}"#);
    assert_eq!(
        code(&twin, "AttachDisk", &[("DiskId", &far), ("InstanceId", "i-far")]),
        "ResourcesNotInSameZone"
    );
}

#[test]
fn a_disk_changes_its_category_by_a_task() {
    let directory = Directory::new();
    let twin = start(&directory);
    let usual = [
        ("ZoneId", "cn-hangzhou-h"),
        ("DiskCategory", "cloud_essd"),
        ("Size", "20"),
        ("PerformanceLevel", "PL0"),
    ];
    let id = ok(&twin, "CreateDisk", &usual)["DiskId"].as_str().unwrap().to_owned();
    until(&twin, &id, "Available");
    let higher = [("DiskId", id.as_str()), ("PerformanceLevel", "PL1")];
    let dry: Vec<_> = higher.iter().chain(&[("DryRun", "true")]).copied().collect();
    assert_eq!(code(&twin, "ModifyDiskSpec", &dry), "DryRunOperation");
    let task = ok(&twin, "ModifyDiskSpec", &higher)["TaskId"].as_str().unwrap().to_owned();
    eventually("the task ends", || {
        let tasks = ok(&twin, "DescribeTasks", &[("TaskIds", &task)]);
        (tasks["TaskSet"]["Task"][0]["TaskStatus"] == json!("Finished")).then_some(())
    });
    assert_eq!(disk(&twin, &id)["PerformanceLevel"], json!("PL1"));
    assert_eq!(code(&twin, "ModifyDiskSpec", &higher), "NoChangeInDiskCategoryAndPerformanceLevel");
}

#[test]
fn instances_types_and_metadata_are_described() {
    let directory = Directory::new();
    let twin = start(&directory);
    let instances = ok(&twin, "DescribeInstances", &[("InstanceIds", r#"["i-b"]"#)]);
    assert_eq!(instances["Instances"]["Instance"][0]["InstanceType"], json!("ecs.g7.large"));
    let types = ok(&twin, "DescribeInstanceTypes", &[("InstanceTypes.1", "ecs.g7.large")]);
    assert_eq!(types["InstanceTypes"]["InstanceType"][0]["DiskQuantity"], json!(17));
    let resource =
        ok(&twin, "DescribeAvailableResource", &[("DestinationResource", "DataDisk"), ("Scope", "region")]);
    assert_eq!(resource["AvailableZones"]["AvailableZone"][0]["ZoneId"], json!(""));
    let quota = ok(&twin, "DescribeAccountAttributes", &[]);
    let first = &quota["AccountAttributeItems"]["AccountAttributeItem"][0];
    assert_eq!(first["AttributeName"], json!("max-postpaid-yundisk-capacity"));

    let base = "/_node/i-b/latest";
    let document = format!("{base}/dynamic/instance-identity/document");
    assert_eq!(twin.send("GET", &document, "", "").unwrap().status, 401);
    let ttl = "x-aliyun-ecs-metadata-token-ttl-seconds: 63\r\n";
    let token = twin.send("PUT", &format!("{base}/api/token"), ttl, "").unwrap().text;
    let header = format!("x-aliyun-ecs-metadata-token: {token}\r\n");
    let document = twin.send("GET", &document, &header, "").unwrap().json();
    assert_eq!((&document["instance-id"], &document["zone-id"]), (&json!("i-b"), &json!("cn-hangzhou-h")));
}

#[test]
fn a_group_of_snapshots_is_taken_once_and_removed_with_its_members() {
    let directory = Directory::new();
    let twin = start(&directory);
    let disks = [create(&twin, &[]), create(&twin, &[])];
    for id in &disks {
        until(&twin, id, "Available");
    }
    let asked = [("Name", "g"), ("DiskId.1", &*disks[0]), ("DiskId.2", &*disks[1]), ("ClientToken", "t")];
    let id = ok(&twin, "CreateSnapshotGroup", &asked)["SnapshotGroupId"].as_str().unwrap().to_owned();
    assert_eq!(ok(&twin, "CreateSnapshotGroup", &asked)["SnapshotGroupId"], json!(id), "the token finds it");
    assert_eq!(code(&twin, "CreateSnapshotGroup", &asked[1..]), "IdempotentParameterMismatch");
    let groups = |by: (&str, &str)| {
        ok(&twin, "DescribeSnapshotGroups", &[by])["SnapshotGroups"]["SnapshotGroup"].clone()
    };
    let group = eventually("the group is there", || {
        Some(groups(("Name", "g"))[0].clone()).filter(|group| group["Status"] == json!("accomplished"))
    });
    let members = group["Snapshots"]["Snapshot"].as_array().unwrap();
    let sources: Vec<_> = members.iter().map(|member| member["SourceDiskId"].as_str().unwrap()).collect();
    assert_eq!(sources, [&disks[0], &disks[1]]);
    let of_disk =
        |disk: &str| ok(&twin, "DescribeSnapshots", &[("DiskId", disk)])["Snapshots"]["Snapshot"].clone();
    assert_eq!(of_disk(&disks[0])[0]["SnapshotName"], json!(format!("Created_from_{id}")));

    let old = ok(
        &twin,
        "CreateDisk",
        &[("ZoneId", "cn-hangzhou-h"), ("DiskCategory", "cloud_ssd"), ("Size", "20")],
    );
    let old = old["DiskId"].as_str().unwrap();
    for (parameters, expected) in [
        (vec![], "MissingDiskId"),
        (vec![("DiskId.1", "d-none")], "InvalidDiskId.NotFound"),
        (vec![("DiskId.1", old)], "InvalidDiskCategory.NotSupported"),
    ] {
        assert_eq!(code(&twin, "CreateSnapshotGroup", &parameters), expected);
    }
    ok(&twin, "DeleteSnapshotGroup", &[("SnapshotGroupId", &id)]);
    assert_eq!(
        code(&twin, "DeleteSnapshotGroup", &[("SnapshotGroupId", &id)]),
        "InvalidSnapshotGroupId.NotFound"
    );
    assert_eq!((groups(("SnapshotGroupId.1", &id)), of_disk(&disks[0])), (json!([]), json!([])));
}
