package main

import (
	"encoding/json"
	"sort"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	structural "k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/defaulting"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/listtype"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/pruning"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	kjson "sigs.k8s.io/json"
)

// custom prunes, defaults and validates an object by a schema, as the API server does with custom resources.
func custom(asked request) (answer, error) {
	var given apiextensionsv1.JSONSchemaProps
	if err := json.Unmarshal(asked.Patch, &given); err != nil {
		return answer{}, err
	}
	var props apiextensions.JSONSchemaProps
	if err := apiextensionsv1.Convert_v1_JSONSchemaProps_To_apiextensions_JSONSchemaProps(&given, &props, nil); err != nil {
		return answer{}, err
	}
	schema, err := structural.NewStructural(&props)
	if err != nil {
		return answer{}, err
	}
	if errs := structural.ValidateStructural(nil, schema); len(errs) > 0 {
		return answer{Text: "schema", Strict: texts(errs)}, nil
	}
	object := map[string]any{}
	must(kjson.UnmarshalCaseSensitivePreserveInts(asked.Object, &object))
	unknown := pruning.PruneWithOptions(object, schema, true,
		structural.UnknownFieldPathOptions{TrackUnknownFieldPaths: true})
	defaulting.PruneNonNullableNullsWithoutDefaults(object, schema)
	defaulting.Default(object, schema)
	validator, _, err := validation.NewSchemaValidator(&props)
	if err != nil {
		return answer{}, err
	}
	errs := validation.ValidateCustomResource(nil, object, validator)
	errs = append(errs, listtype.ValidateListSetsAndMaps(nil, schema, object)...)
	text, err := json.Marshal(object)
	strict := texts(errs)
	for _, path := range unknown {
		strict = append(strict, "unknown "+path)
	}
	sort.Strings(strict)
	return answer{Object: text, Strict: strict}, err
}

func texts(errs field.ErrorList) []string {
	texts := []string{}
	for _, err := range errs {
		texts = append(texts, string(err.Type)+" | "+err.Field+" | "+err.ErrorBody())
	}
	sort.Strings(texts)
	return texts
}
