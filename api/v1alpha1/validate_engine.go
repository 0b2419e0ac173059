package v1alpha1

import (
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func validateEngine(s *KVCPoolSpec, at *field.Path) field.ErrorList {
	e := &s.Engine
	errs := concat(
		oneOf(at.Child("type"), e.Type, EngineSGLang, EngineEmulator),
		oneOf(at.Child("directPath"), e.DirectPath, DirectPathAuto, DirectPathConditionalAggregation,
			DirectPathNativeAdmission, DirectPathUnified, DirectPathDeltaTransfer),
		oneOf(at.Child("transferBackend"), e.TransferBackend, TransferMooncake, TransferNIXL, TransferMooncakeTCP),
		between(at.Child("pageSize"), e.PageSize, 1, 1024),
		between(at.Child("memFractionStaticPercent"), e.MemFractionStaticPercent, 1, 99),
		oneOf(at.Child("kvCacheDtype"), e.KVCacheDtype, kvCacheDtypes()...),
		validateKVTier(e.KVTier, at.Child("kvTier")),
		validateExtraArgs(s, at.Child("extraArgs")),
	)
	errs = append(errs, named(at.Child("gpuResource"), e.GPUResource, validation.IsQualifiedName(e.GPUResource))...)
	if e.ShmSize.Sign() <= 0 {
		errs = append(errs, field.Invalid(at.Child("shmSize"), e.ShmSize.String(), "must be more than 0, such as 16Gi"))
	}
	return errs
}

// kvCacheDtypes are the values of SGLang's --kv-cache-dtype.
func kvCacheDtypes() []string {
	return []string{"auto", "bf16", "bfloat16", "fp8_e5m2", "fp8_e4m3", "fp4_e2m1"}
}

func validateKVTier(t *KVTierSpec, at *field.Path) field.ErrorList {
	if t == nil {
		return nil
	}
	errs := oneOf(at.Child("store"), t.Store, KVStoreNone, KVStoreFile, KVStoreMooncake)
	if t.Host.Sign() <= 0 {
		errs = append(errs, field.Invalid(at.Child("host"), t.Host.String(),
			"must be more than 0, such as 64Gi; remove kvTier to have none"))
	}
	return errs
}
