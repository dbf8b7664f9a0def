//! What a driver learns and checks when it starts, and how a node knows a disk.

use super::*;

#[tokio::test]
async fn the_secret_is_in_no_error_and_a_wrong_key_ends_the_start() {
    let server = Scripted::serve(|asked| {
        let authorization = asked.headers["authorization"].to_str().unwrap();
        assert!(authorization.starts_with("ACS3-HMAC-SHA256 Credential=key,"), "{authorization}");
        Reply::Json(
            400,
            json!({
                "Code": "SignatureDoesNotMatch", "RequestId": "R-1",
                "Message": "Specified signature is not matched. server string to sign is:everything",
            }),
        )
    })
    .await;
    let config = config(&server.url);
    assert!(!format!("{config:?}").contains("hush"));
    let error = Aliyun::open(config.clone(), Mode::Controller).await.unwrap_err().to_string();
    assert!(error.contains("not accepted") && error.contains("R-1"), "{error}");
    assert!(!error.contains("hush") && !error.contains("everything"), "{error}");
    for (changed, word) in [
        (
            Config { endpoint: Some("http://ecs.cn-hangzhou.aliyuncs.com/".to_owned()), ..config.clone() },
            "loopback",
        ),
        (Config { endpoint: Some(format!("{}path", server.url)), ..config.clone() }, "path"),
        (Config { key: None, ..config.clone() }, "ALIBABA_CLOUD_ACCESS_KEY_ID"),
    ] {
        let error = Aliyun::open(changed, Mode::Controller).await.unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
}

#[tokio::test]
async fn a_node_learns_what_it_is_with_a_token_and_needs_no_key() {
    let server = Scripted::serve(|asked| match asked.line().as_str() {
        "PUT /latest/api/token" => {
            assert_eq!(asked.headers["x-aliyun-ecs-metadata-token-ttl-seconds"], "63");
            Reply::Json(200, json!("token-1"))
        }
        "GET /latest/dynamic/instance-identity/document" => {
            assert_eq!(asked.headers["x-aliyun-ecs-metadata-token"], "token-1");
            let document = json!({
                "region-id": "cn-hangzhou", "zone-id": "cn-hangzhou-i", "instance-id": "i-9",
                "instance-type": "ecs.g7.large", "image-id": "x",
            });
            Reply::Json(200, document)
        }
        _ => Reply::Json(404, Value::Null),
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let config = Config {
        region: None,
        zone: None,
        node_id: None,
        key: None,
        metadata_url: server.url.clone(),
        state_dir: dir.path().to_owned(),
        ..config(&server.url)
    };
    let cloud = Aliyun::open(config.clone(), Mode::Node).await.unwrap();
    let node = cloud.node.as_ref().unwrap();
    let expected = Topology(map(&[
        ("alibabacloud.com/ecs-instance-id", "i-9"),
        ("topology.diskplugin.csi.alibabacloud.com/zone", "cn-hangzhou-i"),
        ("topology.kubernetes.io/region", "cn-hangzhou"),
        ("topology.kubernetes.io/zone", "cn-hangzhou-i"),
    ]));
    assert_eq!((node.id.as_str(), &node.topology, node.limit), ("i-9", &expected, None));
    let private = Config { private_topology: true, max_volumes: 7, ..config };
    let cloud = Aliyun::open(private, Mode::Node).await.unwrap();
    let node = cloud.node.as_ref().unwrap();
    assert_eq!((node.topology.0.contains_key(KUBERNETES_ZONE), node.limit), (false, Some(7)));
    assert_eq!(node.topology.0[OWN_REGION], "cn-hangzhou");
}

#[test]
fn a_device_is_known_by_its_serial_number_and_a_cache_is_refused() {
    let mut volume = NodeVolume {
        id: "d-bp1abc".parse().unwrap(),
        capability: capability(),
        read_only: false,
        context: map(&[("type", "cloud_essd")]),
        publish_context: map(&[("serialNumber", "bp1abc")]),
        staging: None,
    };
    let wanted = Volumes.wanted(&volume).unwrap();
    assert_eq!(wanted.links, ["virtio-bp1abc", "nvme-Alibaba_Cloud_Elastic_Block_Storage_bp1abc"]);
    assert_eq!(wanted.identity, Identity::Serial("bp1abc".to_owned()));
    volume.context.insert("dataCacheSize".to_owned(), "10Gi".to_owned());
    assert!(
        matches!(Volumes.wanted(&volume), Err(Error::Precondition(said)) if said.contains("dataCacheSize"))
    );
    volume.context.clear();
    for wrong in [None, Some(""), Some("../x")] {
        volume.publish_context = wrong.map(|serial| map(&[("serialNumber", serial)])).unwrap_or_default();
        assert!(matches!(Volumes.wanted(&volume), Err(Error::Invalid(_))), "{wrong:?}");
    }
}
