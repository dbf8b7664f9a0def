//! Lists: selectors, pages, versions.

use super::*;

async fn filled(count: usize) -> Api {
    let api = Api::new().await;
    for index in 0..count {
        let mut one = map(&format!("m-{index:03}"));
        one["metadata"]["labels"] =
            json!({ "even": (index % 2 == 0).to_string(), "number": index.to_string() });
        api.post("/api/v1/namespaces/kube-public/configmaps", &one).await;
    }
    api
}

const PATH: &str = "/api/v1/namespaces/kube-public/configmaps";

fn names(list: &Value) -> Vec<&str> {
    let items = list["items"].as_array().unwrap();
    items
        .iter()
        .map(|item| item["metadata"]["name"].as_str().unwrap())
        .filter(|name| name.starts_with("m-"))
        .collect()
}

#[tokio::test]
async fn a_list_has_a_version_and_ordered_items() {
    let api = filled(3).await;
    let (_, list) = api.get(PATH).await;
    assert_eq!((&list["kind"], &list["apiVersion"]), (&json!("ConfigMapList"), &json!("v1")));
    assert!(list["metadata"]["resourceVersion"].as_str().unwrap().parse::<u64>().unwrap() > 0);
    assert_eq!(names(&list), ["m-000", "m-001", "m-002"]);
    assert_eq!(names(&api.get("/api/v1/configmaps").await.1).len(), 3);
    assert_eq!(names(&api.get(MAPS).await.1).len(), 0);
}

#[tokio::test]
async fn selectors_pick_by_labels_and_fields() {
    let api = filled(4).await;
    let get = |query: &str| {
        let path = format!("{PATH}?{query}");
        let api = &api;
        async move { api.get(&path).await.1 }
    };
    assert_eq!(names(&get("labelSelector=even%3Dtrue").await), ["m-000", "m-002"]);
    assert_eq!(names(&get("labelSelector=number+in+%281,3%29").await), ["m-001", "m-003"]);
    assert_eq!(names(&get("fieldSelector=metadata.name%3Dm-001").await), ["m-001"]);
    assert_eq!(
        names(&get("fieldSelector=metadata.name!%3Dm-001&labelSelector=even%3Dfalse").await),
        ["m-003"]
    );
    let status = get("fieldSelector=spec.color%3Dred").await;
    assert_eq!(reason(&status), "BadRequest");
    assert!(
        status["message"].as_str().unwrap().contains("\"spec.color\" is not a known field selector"),
        "{status}"
    );
    assert_eq!(reason(&get("labelSelector=%3D%3D").await), "BadRequest");
}

#[tokio::test]
async fn pages_show_one_moment_whatever_is_written_meanwhile() {
    let api = filled(7).await;
    let path = format!("{PATH}?limit=3&labelSelector=number");
    let (_, first) = api.get(&path).await;
    assert_eq!(names(&first), ["m-000", "m-001", "m-002"]);
    api.delete(&format!("{PATH}/m-004")).await;
    api.post(PATH, &map("m-0035")).await;
    let token = first["metadata"]["continue"].as_str().unwrap();
    let (_, second) = api.get(&format!("{path}&continue={token}")).await;
    assert_eq!(names(&second), ["m-003", "m-004", "m-005"]);
    assert_eq!(second["metadata"]["resourceVersion"], first["metadata"]["resourceVersion"]);
    let token = second["metadata"]["continue"].as_str().unwrap();
    let (_, third) = api.get(&format!("{path}&continue={token}")).await;
    assert_eq!(names(&third), ["m-006"]);
    assert_eq!(third["metadata"].get("continue"), None);
}

#[tokio::test]
async fn pages_without_selectors_say_how_many_are_left() {
    let api = filled(7).await;
    let all = api.get(PATH).await.1["items"].as_array().unwrap().len();
    let (_, first) = api.get(&format!("{PATH}?limit=3")).await;
    assert_eq!(first["metadata"]["remainingItemCount"], all - 3);
    let token = first["metadata"]["continue"].as_str().unwrap();
    let (_, second) = api.get(&format!("{PATH}?limit=2&continue={token}")).await;
    assert_eq!(second["metadata"]["remainingItemCount"], all - 5);
}

#[tokio::test]
async fn an_expired_page_comes_with_a_token_that_goes_on_anyway() {
    let api = Api::with(store::Options { history_events: 4, ..store::Options::default() }).await;
    for index in 0..6 {
        api.post(MAPS, &map(&format!("m-{index:03}"))).await;
    }
    let (_, first) = api.get(&format!("{MAPS}?limit=2")).await;
    for index in 10..20 {
        api.post(MAPS, &map(&format!("m-{index:03}"))).await;
    }
    let token = first["metadata"]["continue"].as_str().unwrap();
    let (code, status) = api.get(&format!("{MAPS}?limit=2&continue={token}")).await;
    assert_eq!((code, reason(&status)), (410, "Expired"));
    let token = status["metadata"]["continue"].as_str().unwrap();
    let (code, next) = api.get(&format!("{MAPS}?limit=2&continue={token}")).await;
    assert_eq!(code, 200, "{next}");
    assert!(!names(&next).contains(&names(&first)[0]));
    assert_eq!(api.get(&format!("{MAPS}?limit=2&continue=junk")).await.0, 400);
}

#[tokio::test(start_paused = true)]
async fn versions_are_heeded() {
    let api = filled(2).await;
    let (_, before) = api.get(PATH).await;
    let version = before["metadata"]["resourceVersion"].as_str().unwrap();
    api.post(PATH, &map("m-9")).await;
    let (_, exact) = api.get(&format!("{PATH}?resourceVersion={version}&resourceVersionMatch=Exact")).await;
    assert_eq!(names(&exact).len(), 2);
    let (_, newer) =
        api.get(&format!("{PATH}?resourceVersion={version}&resourceVersionMatch=NotOlderThan")).await;
    assert_eq!(names(&newer).len(), 3);
    assert_eq!(api.get(&format!("{PATH}?resourceVersion=0")).await.0, 200);
    assert_eq!(api.get(&format!("{PATH}?resourceVersionMatch=Exact")).await.0, 422);
    assert_eq!(api.get(&format!("{PATH}?sendInitialEvents=true")).await.0, 422);
    assert_eq!(api.get(&format!("{PATH}?resourceVersion=99999999")).await.0, 504);
}
